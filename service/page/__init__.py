"""The status page: one HTML document, rendered in full, that a small script keeps up to date.

words       durations, ages and names
headline    the state in one line
rows        what the tables show, in which order
render      the documents
page.html, down.html, frame.html    templates
page.css, page.js                   what a route serves beside the page, as `STYLE` and `SCRIPT`
"""

from weightsync.service.page.render import CONTENT_SECURITY_POLICY, SCRIPT, STYLE, render_down, render_page

__all__ = ["CONTENT_SECURITY_POLICY", "SCRIPT", "STYLE", "render_down", "render_page"]
