"""The HTML report: grouped, complete, self-contained, inert, and readable in a browser in both colour schemes."""

import dataclasses
import fnmatch
import html
import json
import re
import shutil
import subprocess
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_compare import CURVE, HEAT, perplexity, result, saved
from typer.testing import CliRunner

import ctxext
from ctxext.cli import app
from ctxext.evaluation.report import write_report

PLOTS = [dataclasses.asdict(CURVE), dataclasses.asdict(HEAT)]
EVIL = "</title><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">'&$\\x$"


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.words.append(data)

    def attributes(self, name):
        return [attributes[name] for _, attributes in self.tags if name in attributes]


def named(name, digest, factor=1.0, **changes):
    checkpoint = {"name": name, "hash": digest, "original_window": 8192}
    return perplexity(factor, **{"checkpoint": checkpoint, "plots": PLOTS, "options": {"length": 64}, **changes})


def report(folder, *results, title="A title"):
    output = folder / "report.html"
    answer = write_report(saved(folder, *results), output, title)
    return answer, Page(output)


def test_results_are_grouped_by_what_may_be_compared(tmp_path):
    longer = {"protocol_id": "perplexity-v1:length=128,stride=8", "options": {"length": 128}}
    results = [
        named("base", "h0", **longer),
        named("yarn", "h1", 1.02),
        named("base", "h0"),
        named("yarn", "h1", 0.9, **longer),
        named("yarn", "h1", corpus={"hash": "c2"}),
    ]
    answer, page = report(tmp_path, *results)
    assert answer["results"] == 5
    groups = [(group["title"], [row["checkpoint"] for row in group["results"]]) for group in answer["groups"]]
    # Shorter first, the first file's checkpoint first in each group, another corpus apart.
    assert groups == [
        ("perplexity, 64 tokens", ["base", "yarn"]),
        ("perplexity, 64 tokens", ["yarn"]),
        ("perplexity, 128 tokens", ["base", "yarn"]),
    ]
    for part in (
        "5 results of 2 checkpoints",
        "perplexity-v1:length=128,stride=8",
        "12 documents",
        "Difference to base",
    ):
        assert part in page.text
    # exp(0.02 * 2.55) - 1 and exp(-0.1 * 2.55) - 1
    assert "+5.23%" in page.text and "-22.5%" in page.text


def test_groups_of_one_evaluation_and_length_say_how_they_differ(tmp_path):
    kinds = [
        named(
            "base",
            "h0",
            protocol_id=f"p-v1:length={length},variant={kind}",
            options={"length": length, "kind_of": kind},
        )
        for length, kind in ((64, "digits"), (64, "needle"), (128, "digits"))
    ]
    answer, _ = report(tmp_path, *kinds)
    titles = [group["title"] for group in answer["groups"]]
    assert titles == [
        "perplexity, 64 tokens, kind of digits",
        "perplexity, 64 tokens, kind of needle",
        "perplexity, 128 tokens",
    ]


def test_success_by_length_and_depth_of_a_checkpoint(tmp_path):
    def passkey(length, name="base"):
        plot = {**PLOTS[1], "id": "passkey", "x": [length // 4, length], "y": [1.0, 0.25]}
        identity = {"evaluation": "passkey", "protocol_id": f"passkey-v1:length={length},trials=4", "corpus": None}
        of = {
            "options": {"length": length},
            "metrics": {"k_max": length // 4},
            "checkpoint": {"name": name, "hash": name},
        }
        return result(plots=[plot], **of, **identity)

    _, page = report(tmp_path, passkey(128), passkey(64), passkey(64, "yarn"))
    assert "passkey of base by length and depth" in page.text and "passkey of yarn by length" not in page.text
    text = (tmp_path / "report.html").read_text()
    picture = text[text.index("<svg") : text.index("</svg>")]
    said = re.findall(r"<text[^>]*>([^<]*)</text>", picture)
    # Rows by length; the key nearest to the end, found always, is three quarters down.
    assert "depth in the prompt (%)" in said and said.index("64 tokens") < said.index("128 tokens")
    assert [word for word in said if word in ("1", "0.25")] == ["0.25", "1", "0.25", "1"]
    assert page.text.index("Overview") < page.text.index("by length and depth") < page.text.index("v1:length=64")


def test_footnotes_and_what_numbers_depend_on(tmp_path):
    corpus = {"name": "sympy-source", "hash": "c" * 64, "documents": 12, "tokens": 500}
    other = {"dtype": "bfloat16", "versions": {"torch": "2.12"}, "corpus": corpus, "seed": 3}
    first = named("base", "sha-base", versions={"torch": "2.11"}, corpus=corpus, seed=3)
    _, page = report(tmp_path, first, named("yarn", "sha-yarn", notes=["a note", "only yarn's"], **other))
    for part in (
        "dtype: bfloat16, where the first has float32",
        "torch: 2.12, where the first has 2.11",
        "only yarn's",
        "a note",
        "3 documents too short",
        "sympy-source",
        "c" * 64,
        "sha-base",
        "sha-yarn",
        "paired percentile bootstrap, 10000 resamples, seed 0",
        "original window 8192",
        "1.json",
    ):
        assert part in page.text
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    assert {href for href in page.attributes("href") if href.startswith("#note")} <= {f"#{name}" for name in ids}


def test_nothing_outside_the_file_and_no_script(tmp_path):
    _, page = report(tmp_path, named("base", "h0"), named("yarn", "h1", 1.02))
    assert not {"script", "link", "img", "iframe", "object", "embed", "form", "base"} & {tag for tag, _ in page.tags}
    assert all(href.startswith("#") for href in page.attributes("href")) and not page.attributes("src")
    text = (tmp_path / "report.html").read_text()
    assert not re.search(r"https?:|//[a-z]|@import|javascript:", text)
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert "default-src 'none'" in page.attributes("content")[2]
    # The text of the pictures is text, their colours the page's: only the heat map's cells have their own.
    assert "tokens" in re.findall(r"<text[^>]*>([^<]*)</text>", text)
    picture = text[text.index("<svg") : text.index("</svg>")]
    assert "currentColor" in picture and "var(--series-2)" in picture and not re.search("#[0-9a-f]{6}", picture)


def everything_evil():
    plots = [{**plot, **dict.fromkeys(("title", "x_label", "y_label"), EVIL)} for plot in PLOTS]
    details = {"items": {EVIL: {EVIL: 0.5, "b": 0.5}}}
    words = {"dtype": EVIL, "attention": EVIL, "device": EVIL, "notes": [EVIL], "skipped": {EVIL: 1}, "plots": plots}
    checkpoint = {"name": EVIL, "hash": EVIL, "model_type": EVIL, "rope": {EVIL: EVIL}, "original_window": 8192}
    identity = {
        "evaluation": EVIL,
        "protocol_id": EVIL,
        "corpus": {"hash": EVIL, "name": EVIL},
        "versions": {EVIL: EVIL},
    }
    metrics = {EVIL: 0.5, "b": EVIL}
    return result(metrics=metrics, details=details, checkpoint=checkpoint, **words, **identity)


def test_whatever_comes_from_files_is_inert(tmp_path):
    other = everything_evil()
    other.checkpoint["hash"] = "another"
    _, page = report(tmp_path, everything_evil(), other, named("base", "h0"), title=EVIL)
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    text = (tmp_path / "report.html").read_text()
    assert "<script" not in text and "<img" not in text
    assert page.text.count(EVIL) > 20
    assert html.escape(EVIL, quote=False) in text.split("<svg")[1]


def test_equal_files_make_equal_reports(tmp_path):
    report(tmp_path, named("base", "h0"), named("yarn", "h1", 1.02))
    first = (tmp_path / "report.html").read_bytes()
    paths = [tmp_path / "0.json", tmp_path / "1.json", tmp_path / "0.json"]
    assert write_report(paths, tmp_path / "again.html", "A title")["results"] == 2  # a file given twice counts once
    assert (tmp_path / "again.html").read_bytes() == first


def test_nothing_is_written_when_something_is_wrong(tmp_path):
    output = tmp_path / "report.html"
    output.write_text("old")
    (tmp_path / "a.json").write_text("[]")
    good, strange = saved(tmp_path, named("base", "h0"), named("x", "h1", plots=[{**PLOTS[0], "kind": "pie"}]))
    with pytest.raises(ValueError, match="a.json is not a ctxext result"):
        write_report([good, tmp_path / "a.json"], output, "t")
    with pytest.raises(ValueError, match="kind 'pie'"):
        write_report([strange, good], output, "t")
    assert output.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "1.json", "a.json", "report.html"]


def test_command(tmp_path):
    paths = saved(tmp_path, named("base", "h0"), named("yarn", "h1", 1.02))
    arguments = ["report", *map(str, paths), "--output", str(tmp_path / "deep" / "r.html"), "--title", "Mine & yours"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    assert done.output.split("\n")[:2] == ["perplexity, 64 tokens: base, yarn", f"written to {tmp_path}/deep/r.html"]
    assert "<h1>Mine &amp; yours</h1>" in (tmp_path / "deep" / "r.html").read_text()
    answer = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert answer["groups"][0]["results"][1]["paired"][0]["metric"] == "perplexity"


def test_template_and_style_are_installed():
    root = Path(ctxext.__file__).parent.parent
    if not (root / "pyproject.toml").exists():
        pytest.skip("not run from a source tree")
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    data = [path.name for path in (root / "ctxext/evaluation").iterdir() if path.is_file() and path.suffix != ".py"]
    assert {"report.html.j2", "report.css"} <= set(data)
    assert all(any(fnmatch.fnmatch(name, pattern) for pattern in patterns["ctxext.evaluation"]) for name in data)


PROBE = """<script>
addEventListener("load", () => parent.postMessage({
  title: document.title,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  page: getComputedStyle(document.body).backgroundColor,
  ink: getComputedStyle(document.querySelector("svg text")).fill,
  pictures: [...document.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect().height > 60),
}, "*"));
</script>"""
FRAMES = """<iframe src="probe.html" width="390" height="800"></iframe><pre></pre><script>
addEventListener("message", event => document.querySelector("pre").textContent = JSON.stringify(event.data));
</script>"""


@pytest.fixture
def browse(tmp_path):
    """Return a function that opens a page 390 pixels wide in headless Chromium and says what it is like there."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip(f"no Chromium here: none of {', '.join(names)}")

    def opened(path, scheme):
        # The probe is a script, which the report itself forbids.
        page = re.sub("<meta http-equiv=[^>]*>", "", path.read_text())
        (tmp_path / "probe.html").write_text(page.replace("</body>", f"{PROBE}</body>"))
        (tmp_path / "frames.html").write_text(FRAMES)
        command = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'user'}",
        ]
        command += [f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=5000", "--dump-dom"]
        command += ["--host-resolver-rules=MAP * ~NOTFOUND", (tmp_path / "frames.html").as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        return json.loads(html.unescape(re.search("<pre>(.*?)</pre>", done.stdout, re.DOTALL).group(1)))

    return opened


def test_in_a_browser_on_a_phone_in_both_colour_schemes(tmp_path, browse):
    long_name = "an-organization/with-a-very-long-name-of-a-checkpoint-" + "x" * 60
    report(tmp_path, named(long_name, "h0"), named(EVIL, "h1", 1.02), everything_evil(), title="A title")
    dark, light = (browse(tmp_path / "report.html", scheme) for scheme in (0, 1))
    for seen in (dark, light):
        assert seen["title"] == "A title"
        assert seen["overflow"] == 0 and len(seen["pictures"]) == 4 and all(seen["pictures"])
    assert light["page"] == dark["page"].replace("20, 23, 27", "255, 255, 255") == "rgb(255, 255, 255)"
    assert (light["ink"], dark["ink"]) == ("rgb(28, 32, 36)", "rgb(228, 231, 235)")
