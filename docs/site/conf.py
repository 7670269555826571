"""Sphinx's settings. build.py writes the pages, and calls Sphinx."""

import re

project = "kernel-fusion"
root_doc = "index"
source_suffix = {".md": "markdown"}
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
default_role = "code"  # of `this` in docstrings
suppress_warnings = [
    "myst.header",  # puzzles and exercises are headings of the third level below the first
    "ref.python",  # a module offers what another one holds
    "misc.highlighting_failure",  # prompts and a shell's pictures are no code of any language
]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 6
myst_heading_slug_func = "kernel_fusion.report.documents.anchor"  # links are written for GitHub
myst_linkify_fuzzy_links = False

smartquotes = False  # options begin with --

html_theme = "furo"
html_title = "kernel-fusion"
html_favicon = "static/icon.svg"
html_static_path = ["static", "../../build/site-pages/scripts"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_show_search_summary = False  # it would fetch pages, which a browser refuses where there is no server
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
html_theme_options = {
    "dark_css_variables": {"color-brand-primary": "#8ab8ff", "color-brand-content": "#8ab8ff"},
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
}


def setup(app):
    app.connect("html-page-context", without_tree, priority=100)  # before furo asks for it
    app.connect("autodoc-process-docstring", plain, priority=100)  # before napoleon finds the arguments


def plain(app, what, name, obj, options, lines):
    """Docstrings are plain text but for `code`: what reStructuredText would make more of is escaped."""
    for number, line in enumerate(lines):
        parts = re.split(r"(`[^`]*`)", line)
        lines[number] = "".join(
            part if part.startswith("`") else re.sub(r"[*|\\]|(?<=\w)_(?=\W|$)", r"\\\g<0>", part) for part in parts
        )


def without_tree(app, pagename, templatename, context, doctree):
    """A page of code has no list of all pages beside it: that would take its room, and most of the build's time."""
    if "orphan" in app.env.metadata.get(pagename, {}):
        context["toctree"] = lambda **options: ""
