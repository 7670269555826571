"""Makes the site: `make docs`, which installs what this needs; then open build/site/index.html.

The pages are written into build/site-pages, Sphinx makes HTML of them, all links between files are followed, and the
recorded runs are put into their pages. A warning, or a link that leads nowhere, is an error, and then the site of
before stays as it is.
"""

import html
import os
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.parse

import runs
from pages import SiteError, as_path, page_of, stage
from reference import headers, reference

from kernel_fusion.learn import traces
from kernel_fusion.steps import ROOT

HERE = pathlib.Path(__file__).resolve().parent
SITE = ROOT / "build" / "site"
ADDRESS = re.compile(r'<(?:a|link|script|img|source)\b[^>]*? (?:href|src)="([^"]*)"')
NAME = re.compile(r' id="([^"]*)"')


def dead_links(folder: pathlib.Path) -> list[str]:
    """A line for each link in the HTML files of `folder` that leads to no file there, or to no name in it."""
    texts = {path: path.read_text(encoding="utf-8") for path in folder.rglob("*.html")}
    names = {path: set(NAME.findall(text)) for path, text in texts.items()}
    found = []
    for path, text in texts.items():
        for address in sorted(set(ADDRESS.findall(text))):
            parts = urllib.parse.urlsplit(html.unescape(address))
            if parts.scheme or parts.netloc:
                continue
            target = (
                pathlib.Path(os.path.normpath(path.parent / urllib.parse.unquote(parts.path))) if parts.path else path
            )
            anchor = urllib.parse.unquote(parts.fragment)
            if not target.is_file() or (anchor and target in names and anchor not in names[target]):
                found.append(f"{path.relative_to(folder)}: {address}")
    return found


def main() -> int:
    """Makes the site. Returns the exit code."""
    recording = subprocess.Popen([sys.executable, str(HERE / "runs.py")])  # which takes as long as all else
    try:
        return made(recording)
    finally:
        recording.terminate()
        recording.wait()


def made(recording: subprocess.Popen) -> int:
    """Makes the site with the runs that `recording` makes meanwhile. Returns the exit code."""
    from sphinx.cmd.build import build_main  # not for the tests of what is above

    work, beside = SITE.with_name("site-pages"), SITE.with_name("site.new")
    for folder in (work, beside):
        shutil.rmtree(folder, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        stage(work, reference(), headers())
    except SiteError as error:
        print(f"docs: {error}", file=sys.stderr)
        return 1
    options = ["-q", "-b", "html", "-c", str(HERE), "-d", str(work / ".doctrees"), "-j", "auto", "-W", "--keep-going"]
    if code := build_main([*options, *sys.argv[1:], str(work), str(beside)]):
        return code
    if dead := dead_links(beside):
        print("\n".join(["docs: links that lead nowhere:", *dead]), file=sys.stderr)
        return 1
    if code := recording.wait():
        return code
    for solution in traces.solutions():
        runs.put(solution, (beside / page_of(as_path(solution))).with_suffix(".html"))
    shutil.rmtree(SITE, ignore_errors=True)
    beside.rename(SITE)
    print(f"{len(list(SITE.rglob('*.html')))} pages, from {SITE / 'index.html'} on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
