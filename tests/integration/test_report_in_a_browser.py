"""The page of a run as people see it: in a browser, from its file, without a network."""

from __future__ import annotations

import pytest

from asyncdata.demo import tokenizer_folder
from tests.support.browser import opened_browser
from tests.support.combinations import each_value
from tests.support.html_page import read_page
from tests.support.parts import main
from tests.support.report_pages import page_of, write_hostile_run, write_packed_run, write_run_of
from tests.support.telemetry_files import write_run

pytestmark = pytest.mark.thorough

WIDTHS = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
READ_TABLE = """\
[...document.querySelectorAll("#%s tr")].map((row) => [...row.cells].map((cell) => cell.textContent))"""

TOGGLED = "new Promise((done) => setTimeout(done))"
"""Until the browser has told that something was opened."""

CONTRASTS = """\
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (color) => {
    const [r, g, b] = color.slice(0, 3).map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = rgb(getComputedStyle(at).backgroundColor);
      if (color[3] === 255) return color;
    }
  };
  const low = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!text || !element.checkVisibility() || element.closest("svg, :disabled, script")) continue;
    const [one, other] = [luminance(rgb(getComputedStyle(element).color)), luminance(behind(element))];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (ratio < 4.5) low.push(`${element.tagName}.${element.className} ${ratio.toFixed(2)}`);
  }
  return low;
})()"""

UNNAMED = """\
[...document.querySelectorAll("input, select, button, a, .plot, [role=img], [role=region]")]
  .filter((one) => !one.closest("[hidden]"))
  .filter((one) => !(one.labels?.length || one.getAttribute("aria-label") || one.textContent.trim()))
  .map((one) => one.outerHTML)"""


@pytest.fixture
def browser(tmp_path):
    with opened_browser(tmp_path) as page:
        yield page
        assert page.errors == []
        assert {url for url in page.requests if not url.startswith("file:///")} == set()


@pytest.fixture
def report(tmp_path):
    """A function that writes a run, and then its page."""

    def written(write=write_run):
        write(tmp_path / "run")
        page_of(tmp_path / "run", tmp_path / "report.html")
        return tmp_path / "report.html"

    return written


def shown(page):
    return page.texts(".sample h3")


def test_each_chart_is_drawn_from_the_figures_of_the_telemetry(browser, report):
    path = report()
    browser.open(path)

    written = read_page(path.read_bytes()).tables
    charts = browser.run("[...document.querySelectorAll('figure.chart')].map((chart) => chart.id)")
    assert len(charts) >= 9
    for name in charts:
        marks = browser.run(f"document.querySelectorAll('#{name} svg :is(rect, path)').length")
        box = browser.run(f"document.querySelector('#{name} svg').getBoundingClientRect().width")
        assert (marks > 0, box > 300) == (True, True), name
        assert browser.run(READ_TABLE % f"{name}-data") == written[f"{name}-data"]
    heights = browser.run(
        "[...document.querySelectorAll('#lengths-chart rect')].map((mark) => mark.height.baseVal.value)"
    )
    counts = [int(row[1]) for row in written["lengths-chart-data"][1:]]
    assert heights == pytest.approx([count / 2 for count in counts])  # of an axis to 200, in percent
    assert browser.texts(".verdict .figure") == ["14.9 %", "9.1 %"]


def test_the_pointer_and_the_arrow_keys_read_the_points_of_a_chart(browser, report):
    browser.open(report())
    browser.run("document.querySelector('#lengths-chart .plot').focus()")

    for key in ("ArrowRight", "ArrowRight", "End", "ArrowRight", "ArrowLeft", "Home"):
        browser.press(key)
    assert browser.texts("#tip div") == ["tokens: 54–63", "samples: 160"]
    browser.press("Escape")
    assert browser.run("document.querySelector('#tip').hidden")

    x, y = browser.run(
        "(() => { const plot = document.querySelector('#mix-chart .plot'); plot.scrollIntoView({block: 'center'});"
        "const box = plot.getBoundingClientRect(); return [box.right - 2, box.top + 20]; })()"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert browser.texts("#tip div")[1] == "math: 75.0 %"


def test_samples_are_searched_and_filtered(browser, report):
    browser.open(report())
    assert browser.texts("#found") == ["18 samples"]

    browser.type_into("#text", "OPENER")
    assert (shown(browser), browser.texts("#found")) == (["0:0:40"], ["1 of 18 samples"])
    assert browser.texts(".sample mark") == ["opener"]
    assert (browser.texts(".sample .ids summary"), browser.texts(".sample .ids code")) == (["3 token ids"], [])
    browser.run("document.querySelector('.sample .ids').open = true")
    assert browser.run(f"{TOGGLED}.then(() => document.querySelector('.sample .ids code').textContent)") == "1 3911 204"
    browser.type_into("#text", "math.jsonl:76")
    assert shown(browser) == ["0:0:75"]
    browser.type_into("#text", "nowhere")
    assert browser.texts("#found") == ["0 of 18 samples: no sample has all of this"]

    browser.run("document.querySelector('#filters').reset()")
    browser.type_into("#source", "code")
    browser.type_into("#state", "bad")
    assert browser.texts(".sample .reason") == ["AD421 the row is not valid JSON"]
    browser.type_into("#source", "math")
    browser.type_into("#state", "dropped: too long")
    assert (browser.texts(".sample .reason"), browser.texts(".sample .place")) == (["too long"], ["data/math.jsonl:18"])
    browser.type_into("#source", "code")
    browser.type_into("#state", "")
    browser.type_into("#least", "1")
    assert browser.texts("#found") == ["8 of 18 samples"]
    browser.type_into("#most", "2")
    assert shown(browser) == []


def test_a_click_on_a_heading_sorts_a_table_and_one_more_turns_it_round(browser, report):
    browser.open(report(lambda folder: write_run_of(folder, ranks=12, samples=2)))
    first = "[...document.querySelectorAll('#ranks-table tbody tr')].map((row) => row.cells[0].textContent)"
    click = "document.querySelector('#ranks-table th button').click()"

    browser.run(click)
    assert browser.run(first) == [str(rank) for rank in range(12)]  # as numbers
    browser.run(click)
    assert browser.run(first) == [str(rank) for rank in reversed(range(12))]
    assert browser.run("document.querySelector('#ranks-table th').getAttribute('aria-sort')") == "descending"


def test_many_samples_are_sorted_and_shown_in_pages_that_the_keyboard_reaches(browser, report):
    browser.open(report(lambda folder: write_run_of(folder, ranks=1, samples=45)))
    assert browser.texts("#page") == ["1 to 20"]

    browser.run("document.querySelector('#after').focus()")
    browser.press("Enter")
    browser.press("Enter")
    assert (browser.texts("#page"), shown(browser)[-1]) == (["41 to 45"], "0:0:44")
    assert browser.run("document.querySelector('#after').disabled")
    browser.press("/")
    assert browser.run("document.activeElement.id") == "text"
    browser.type_into("#order", "-tokens")
    assert (browser.texts("#found"), len(shown(browser))) == (["45 samples"], 20)


def test_hostile_rows_run_nothing_and_the_page_forbids_itself_every_request_and_every_other_program(browser, report):
    browser.open(report(write_hostile_run))
    assert browser.run("window.hacked") is None
    assert browser.run("document.querySelectorAll('img, iframe, object, link').length") == 0
    assert "onerror='window.hacked = 1'>" in browser.texts(".sample .passage")[0]
    assert len(shown(browser)) == 3
    assert browser.errors == []
    image = '<img src="https://example.invalid/a.png" onerror="1">'
    browser.run(f"document.body.insertAdjacentHTML('beforeend', '{image}')")
    browser.run("fetch('https://example.invalid/').catch(() => 0)")
    refused, browser.errors = browser.errors, []
    for rule in ("img-src", "connect-src"):
        assert any(rule in error or "default-src" in error for error in refused)
    browser.requests = [url for url in browser.requests if "example.invalid" not in url]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("write", [write_run, write_packed_run, write_hostile_run])
def test_every_text_can_be_read_and_every_control_has_a_name_in_both_colours(browser, report, write, scheme):
    browser.open(report(write), scheme=scheme)
    assert browser.run(CONTRASTS) == []
    assert browser.run(UNNAMED) == []


def test_the_colours_follow_the_system_until_the_reader_chooses(browser, report):
    background = "getComputedStyle(document.body).backgroundColor"
    browser.open(report(), scheme="light")
    light = browser.run(background)
    browser.prefer("dark")
    dark = browser.run(background)

    assert light != dark
    browser.type_into("#theme", "light")
    assert browser.run(background) == light
    browser.prefer("light")
    browser.type_into("#theme", "dark")
    assert browser.run(background) == dark


REPORTS = {
    "usual": write_run,
    "packed": write_packed_run,
    "hostile": write_hostile_run,
    "64 ranks": lambda folder: write_run_of(folder, ranks=64, samples=0),
}


@pytest.mark.parametrize(("write", "width"), each_value(REPORTS, [390, 820, 1280]))
def test_no_page_is_wider_than_the_screen(browser, report, write, width):
    browser.open(report(write), width=width)
    wide, screen = browser.run(WIDTHS)
    assert wide <= screen == width


def test_inspected_rows_have_the_same_view(browser, jsonl_file, tmp_path):
    chat = [{"role": "user", "content": "Is it </script> far?"}, {"role": "assistant", "content": "No.\nNot at all."}]
    data = jsonl_file([{"messages": chat}, {"messages": chat[:1]}, b'{"messages": '], "chats.jsonl")
    words = ("inspect", str(data), "--tokenizer", tokenizer_folder(), "--no-shuffle")
    assert main([*words, "--html", str(tmp_path / "rows.html")]) == 0
    browser.open(tmp_path / "rows.html")

    assert shown(browser) == ["0:0:0", "0:0:1", "0:0:2"]
    assert browser.texts(".sample:first-child .role") == ["user", "assistant"]
    trained = "".join(browser.texts(".sample:first-child .run.trained"))
    assert trained.startswith("No.") and "Not at all." in trained and "far" not in trained
    browser.type_into("#state", "bad")
    assert [reason[:5] for reason in browser.texts(".reason")] == ["AD101"]
    browser.type_into("#state", "dropped")
    assert browser.texts(".reason") == ["no_trained_tokens"]
