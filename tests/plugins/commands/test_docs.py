"""The command `docs`: pages of techniques, a whole site without broken links, and the site in a browser."""

import functools
import html.parser
import http.server
import importlib.metadata
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from core import catalog
from core.__main__ import main
from plugins.commands import docs_source
from plugins.commands.docs import MARK
from plugins.commands.docs_page import code, line, prose
from tests.conftest import Packages

HOSTILE = '''
from core.technique import technique
from lightning.pytorch import Callback

class Base(Callback):
    def __init__(self, words: "dict[str, int] | None" = None):
        pass

@technique(paper="<b>Nobody</b>", conflicts={"SpikeRollback": "a <i>reason</i> | here"})
class Hostile(Base):
    """Does <script>document.title = "taken"</script> | and `<b>` {raw}`x`, https://nowhere.example.

    ```{raw} html
    <script>document.title = "taken"</script>
    ```

    Args:
        words: Some | words <img src=https://nowhere.example/x.png>.

    Example:
        ```
        <script>document.title = "taken"</script>
    """
'''
BROKEN = '''
import a_package_that_is_not_there

class Broken:
    """Cannot be imported.

    Args:
        size: In bytes.
    """
'''
NAMES = {"Hostile": "hostile:Hostile", "../../../Escaped": "hostile:Hostile", "Broken": "broken:Broken"}


def add_strangers(packages):
    packages.add("broken", {}, BROKEN)
    packages.add("hostile", {"leyden.callbacks": NAMES}, HOSTILE)


def read(folder, name):
    return (folder / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.ci
def test_every_technique_has_a_page_that_its_kind_lists(tmp_path, packages):
    add_strangers(packages)
    source = tmp_path / "deep" / "source"
    assert docs_source.write(source) == len(catalog.entries())
    for entry in catalog.entries():
        index = read(source, f"techniques/{entry.kind}/index")
        [page] = re.findall(rf"^\| \[{re.escape(line(entry.name))}\]\((.*?\.md)\)", index, re.MULTILINE)
        assert (source / "techniques" / entry.kind / page).is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"site-packages", "deep"}
    assert {path.name for path in source.parent.iterdir()} == {"source"}

    spikes = read(source, "techniques/callbacks/SpikeRollback")
    assert "| `window` | `int` | `64` | Steps of history" in spikes
    assert "- Not with [SkipStep](SkipStep.md): " in spikes
    assert "- Not with [Hostile](Hostile.md): a \\<i\\>reason\\</i\\> | here" in spikes  # said by the other
    assert "- Not with [SpikeRollback](SpikeRollback.md): " in read(source, "techniques/callbacks/SkipStep")
    assert "--config techniques/spike_rollback" in spikes
    assert "](../../docs/pictures/WarmupCosine.png)" in read(source, "techniques/schedules/WarmupCosine")
    assert (source / "docs" / "pictures" / "WarmupCosine.png").is_file()
    assert "| refused: both react to the same outliers" in spikes  # the row of SkipStep
    assert re.search(r"^Trained together with .*\[ProgressBar\]\(ProgressBar\.md\)", spikes, re.MULTILINE)
    assert "| Optimizer steps until the peak" in read(
        source, "techniques/schedules/WarmupCosine"
    )  # of its base class
    assert "given by the run" in read(source, "techniques/optimizers/AdamW")
    assert "`--output DIR`" in read(source, "techniques/commands/docs")

    hostile = read(source, "techniques/callbacks/Hostile")
    assert "| `words` | `dict[str, int] \\| None` | `None` |" in hostile
    broken = read(source, "techniques/callbacks/Broken")
    assert "a\\_package\\_that\\_is\\_not\\_there" in broken
    assert "| `size` |  |  | In bytes. |" in broken


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("a `b` + c", "a `b` \\+ c"),
        ("- no list", "\\- no list"),
        ("1. no list", "1\\. no list"),
        ("<script>", "\\<script\\>"),
        ("one ` backquote", "one \\` backquote"),
        (":class:`~core.x.Y` and ``z``", "`Y` and `z`"),
    ],
)
def test_text_is_no_markup(text, markdown):
    assert line(text) == markdown
    assert prose(f"{text}\n\nmore") == f"{markdown}\n\nmore" or text.startswith("-")


def test_code_with_backquotes():
    assert code("a`b") == "`` a`b ``"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_site_is_left_alone(kind, tmp_path, capsys):
    output = tmp_path / "site"
    kept = output / "thesis.txt" if kind == "folder" else output
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("years of work")
    assert main(["docs", "--output", str(output)]) == 2
    assert "Name a" in capsys.readouterr().err
    assert kept.read_text() == "years of work"


def test_a_missing_package_is_named_with_the_pip_line(tmp_path, capsys, monkeypatch):
    version = importlib.metadata.version

    def without_furo(name):
        if name == "furo":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_furo)
    assert main(["docs", "--output", str(tmp_path / "site")]) == 2
    assert "furo is not installed: pip install 'leyden[docs]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


class Targets(html.parser.HTMLParser):
    """Collects what a page links to, what it loads, and its anchors."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.anchors, self.scripts = [], [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.loads.append(found["href"])
        if tag in ("script", "img", "iframe", "object", "embed") and (found.get("src") or found.get("data")):
            self.loads.append(found.get("src") or found["data"])


def pages_of(site):
    """Returns page -> what is on it."""
    return {path: Targets(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def broken_links(site):
    """Returns what leads nowhere: files that are not there, anchors that are not on the page."""
    pages = pages_of(site)
    broken = []
    for page, found in pages.items():
        for target in [*found.links, *found.loads]:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            path = path / "index.html" if path.is_dir() else path
            wrong = not path.is_file() or not path.is_relative_to(site)
            if not wrong and parts.fragment and path in pages:
                wrong = unquote(parts.fragment) not in pages[path].anchors
            if wrong:
                broken.append(f"{page.relative_to(site)}: {target}")
    return broken


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The whole site with a stranger's package in it, and what the command printed."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "site-packages").mkdir()
    packages = Packages(folder / "site-packages")
    add_strangers(packages)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(packages.folder), *sys.path])}
    words = [sys.executable, "-m", "core", "docs", "--output", "site"]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    catalog.entries.cache_clear()
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "site", done.stdout


@pytest.mark.slow  # Sphinx takes a minute for all pages
def test_the_site_is_whole_and_needs_no_network(built):
    site, printed = built
    assert len(printed.splitlines()) == 2, printed  # no warning
    assert (site / MARK).is_file()
    assert {path.name for path in site.parent.iterdir()} == {"site", "site-packages"}
    assert not broken_links(site)
    pages = pages_of(site)
    assert len(pages) > len(catalog.entries())
    assert all(any("narrow.css" in load for load in found.loads) for found in pages.values())
    elsewhere = [load for found in pages.values() for load in found.loads if urlsplit(load).netloc]
    assert not elsewhere
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^\s)]*", styles)
    assert "SpikeRollback" in (site / "searchindex.js").read_text(encoding="utf-8")
    hostile = (site / "techniques" / "callbacks" / "Hostile.html").read_text(encoding="utf-8")
    assert "document.title" in hostile
    assert not re.findall(r"<script>document|<img[^>]*nowhere|<b>Nobody|href=.https://nowhere", hostile)


def test_the_link_checker_sees_what_is_broken(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there">x</a><a href="b.html#gone">x</a><img src="c.png">'
    )
    (tmp_path / "b.html").write_text('<p id="there">')
    assert broken_links(tmp_path) == ["a.html: b.html#gone", "a.html: c.png"]


@pytest.fixture
def earlier(tmp_path):
    """A site that is there."""
    site = tmp_path / "site"
    site.mkdir()
    (site / MARK).touch()
    (site / "index.html").write_text("the earlier one")
    return site


@pytest.mark.ci
def test_a_build_that_is_interrupted_leaves_the_earlier_site_alone(earlier, tmp_path, monkeypatch):
    """While pages are written; Sphinx reads all of them before, which takes most of its time."""

    def interrupted(sphinx, **options):
        (Path(sphinx.outdir) / "index.html").write_text("the new one")
        raise KeyboardInterrupt

    monkeypatch.setattr("sphinx.application.Sphinx.build", interrupted)
    assert main(["docs", "--output", str(earlier)]) == 130
    assert (earlier / "index.html").read_text() == "the earlier one"
    assert list(tmp_path.iterdir()) == [earlier]


@pytest.mark.slow  # the test above, with a signal that nothing can react to
def test_a_build_that_is_killed_leaves_the_earlier_site(earlier, tmp_path):
    site = earlier
    words = [sys.executable, "-m", "core", "docs", "--output", str(site)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob(".site.*.tmp/html/*.html")) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert (site / "index.html").read_text() == "the earlier one"


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PROBE = """<!doctype html><title>probe</title><iframe id=page width=390 height=800 src="{}"></iframe><script>
const frame = document.getElementById("page");
frame.onload = () => setInterval(() => {{
  const page = frame.contentDocument;
  const found = [...page.querySelectorAll("ul.search li a")].map(link => link.getAttribute("href"));
  if (page.readyState != "complete" || (page.querySelector("#search-results") && !found.length)) return;
  fetch("/answer", {{method: "POST", body: JSON.stringify(
    {{title: page.title, width: page.documentElement.scrollWidth, found: found}})}});
}}, 300)</script>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files, and takes what the probe in the browser found."""

    def do_POST(self):
        self.server.answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *arguments):
        """Says nothing."""


@pytest.fixture(scope="module")
def browser(built, tmp_path_factory):
    """Returns what a browser shows of a page at a phone's width: its title, its width, what a search found."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(built[0], folder, dirs_exist_ok=True)
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    options += ["--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"]

    def show(address):
        server.answers = queue.Queue()
        (folder / "probe.html").write_text(PROBE.format(address), encoding="utf-8")
        words = [CHROMIUM, *options, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]
        words.append(f"http://127.0.0.1:{server.server_port}/probe.html")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(words, start_new_session=True, **quiet)
        try:
            return server.answers.get(timeout=180)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    yield show
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_the_search_finds_a_technique_in_a_browser(browser):
    found = browser("search.html?q=SpikeRollback")["found"]
    assert found[0].startswith("techniques/callbacks/SpikeRollback.html")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    ["index", "docs/cluster", "configs/README", "techniques/callbacks/SpikeRollback", "techniques/callbacks/Hostile",
     "techniques/networks/GPT", "techniques/strategies/index", "CONTRIBUTING"],
)  # fmt: skip
def test_a_page_fits_a_phone(page, browser):
    shown = browser(f"{page}.html")
    assert shown["width"] <= 390
    assert "leyden" in shown["title"]  # which is the page's own: no script of a docstring ran
