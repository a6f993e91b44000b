"""The demo: what a model draws, how G2RPO teaches it, and what a run did, in a browser.

`session` computes, `views` makes HTML of it, `app` is the only module that knows Gradio.
"""
