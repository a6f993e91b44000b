"""The demo: what a model draws, how G2RPO teaches it, and what a run did, in a browser.

`model` and `drawing` compute, `views` makes HTML of it, `app` alone knows Gradio.
"""
