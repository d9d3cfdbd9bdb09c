"""Put README.md and MULTI_GPU_TRAINING.md among the pages of `mkdocs build`, with links that fit."""

import re
from pathlib import Path

from mkdocs.structure.files import File

REPO = Path(__file__).resolve().parents[1]
OUTSIDE = {"README.md": "index.md", "MULTI_GPU_TRAINING.md": "MULTI_GPU_TRAINING.md"}  # of docs/


def on_files(files, config):
    for source, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=(REPO / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, **_):
    """Links to files that are no pages become plain text."""
    folder = REPO if page.file.src_uri in OUTSIDE.values() else REPO / "docs"

    def fitting(match):
        text, target, section = match.groups("")
        path = (folder / target).resolve()
        if not target or not path.exists():  # another site, a section of the page, or code
            return match[0]
        name = path.relative_to(REPO).as_posix()
        page_name = OUTSIDE.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else "")
        return f"[{text}]({page_name}{section})" if page_name else text

    markdown = re.sub(r"\[((?:!\[[^\]]*\]\([^)]*\)|[^\[\]])*)\]\(([^)#\s]*)(#[^)\s]*)?\)", fitting, markdown)
    return re.sub(r'(src|srcset)="docs/', r'\1="', markdown)
