"""`weightsync bench`: weightsync beside the limit of the link and beside what people do today.

layout, values   the model: who holds what, who wants what, and which bytes are right
ways/            one file per way to move them
cases, suites    what is measured
members, stage   the processes it is measured between
run              rounds in which all ways take turns
statistics       medians, spreads, ratios within a round
results          what came out, as JSON
view, plot, markdown   how it looks
"""
