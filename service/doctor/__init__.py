"""`weightsync doctor`: what users of weight synchronisation trip over, looked for before it happens.

    facts.py, probe.py          what a process can find out about its node
    examiner.py                 the actor that does so on every node, and reads from the others
    examine.py                  join the cluster, ask all nodes, measure pairs, leave nothing behind
    thresholds.py               every figure that decides, with where it comes from
    judge_node.py, judge_cluster.py    from facts to findings; pure
    report.py, view.py          what is printed

Nothing here changes a setting of any machine.
"""
