"""A hook of mkdocs: each notebook in docs/ becomes a page of the same name.

nbconvert writes it as Markdown, so the pages have the site's colours, its search and its checks of links.
"""

from __future__ import annotations

import re

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put a page beside each notebook. Called by mkdocs when it has listed the files."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        notebook = nbformat.reads(file.content_string, as_version=4)
        text, _ = MarkdownExporter().from_notebook_node(notebook)
        # Between notebooks, a link names the notebook: so it also works where the repository is read.
        text = re.sub(r"\]\(([\w-]+)\.ipynb\)", r"](\1.md)", text)
        files.append(File.generated(config, file.src_uri.replace(".ipynb", ".md"), content=text))
    return files
