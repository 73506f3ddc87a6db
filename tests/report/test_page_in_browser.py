"""The HTML page in a real browser: what a user points at, moves and types."""

from __future__ import annotations

import pytest
from lanes import nightly

from megatron_pipemem.schedule.costs import Costs
from megatron_pipemem.tools.report import save_comparison, save_timeline
from megatron_pipemem.tools.report.browser import to_html
from megatron_pipemem.tools.report.timeline import DrawnRun

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402 - only after importorskip
from selenium.webdriver.common.keys import Keys  # noqa: E402

# The full lane reads the page's data and structure, and does not run its script.
pytestmark = nightly("tests/report/test_timeline.py")


class Page:
    """A page as its user meets it."""

    def __init__(self, driver, path):
        self.driver = driver
        driver.get(path.as_uri())
        self.settle()

    def settle(self):
        """Wait for the next frame to be drawn."""
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")

    def script(self, code: str, *arguments):
        return self.driver.execute_script(code, *arguments)

    def text(self, name: str) -> str:
        return self.script("return document.getElementById(arguments[0]).innerText", name)

    def point_at(self, x: float, y: float) -> list[str]:
        """The lines of the tooltip there; none when it is hidden."""
        chain = ActionChains(self.driver, duration=0)
        chain.w3c_actions.pointer_action.move_to_location(round(x), round(y))
        chain.perform()
        self.settle()
        return self.text("tip").split("\n") if not self.script("return document.getElementById('tip').hidden") else []

    def locate(self, action, run: int = 0) -> dict:
        return self.script("return pipemem.locate(arguments[0], arguments[1])", str(action), run)

    def view(self) -> tuple[float, float]:
        return tuple(self.script("return [pipemem.view.start, pipemem.view.end]"))

    def colour_at(self, x: float, y: float, run: int = 0) -> str:
        return self.script(
            """const canvas = document.querySelectorAll("canvas")[arguments[2]], box = canvas.getBoundingClientRect();
            const ratio = canvas.width / box.width, pen = canvas.getContext("2d");
            const at = value => Math.round(value * ratio);
            const [r, g, b] = pen.getImageData(at(arguments[0] - box.left), at(arguments[1] - box.top), 1, 1).data;
            return "#" + [r, g, b].map(part => part.toString(16).padStart(2, "0")).join("");""",
            x, y, run,
        )  # fmt: skip

    def errors(self) -> list[str]:
        if self.driver.name == "firefox":
            return []
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture
def open_page(browser, tmp_path):
    pages = []

    def show(*timelines) -> Page:
        path = tmp_path / "page.html"
        save_timeline(timelines[0], path) if len(timelines) == 1 else save_comparison(timelines, path)
        pages.append(Page(browser, path))
        return pages[-1]

    yield show
    assert [page.errors() for page in pages] == [[]] * len(pages)


def test_pointing_at_actions_tells_all_about_them(run, open_page):
    timeline = run("v-half", 4, 8, Costs(1, 1.1, 0.9, p2p=0.25))
    page = open_page(timeline)
    rows = DrawnRun(timeline).rows
    needed = DrawnRun(timeline).awaited
    idle = {bubble.consumer.action: bubble for row in DrawnRun(timeline).bubbles for bubble in row if bubble.consumer}
    for row in rows:
        for place in (0, 1, len(row) // 2, len(row) - 1):
            box, before = row[place], row[place - 1].held if place else 0.0
            spot = page.locate(box.action)
            head, what, when, waits, holds = page.point_at(spot["x"], spot["y"])
            kind, stage, microbatch = box.action
            assert head.startswith(f"{box.action}: ")
            assert what == f"microbatch {microbatch}, stage {stage}, device {box.device}, chunk {box.chunk}"
            assert when == f"{box.start:.6g} to {box.end:.6g} ({box.seconds:.6g})"
            source = needed.get(box.action)
            if box.action in idle:
                gap = idle[box.action].end - idle[box.action].start
                assert waits == f"waited {gap:.6g} for {source.action} of device {source.device}"
            elif source:
                assert waits.startswith(
                    f"needs {source.action} of device {source.device}, there since {source.end:.6g}"
                )
            else:
                assert waits == "needs no other device"
            assert holds == f"holds {max(before, box.held):.4g} while it runs, {box.held:.4g} after"


def test_a_notebook_frames_the_whole_page(run, browser, tmp_path):
    """As high as its content, without scroll bars, and without the paragraph of hints."""
    path = tmp_path / "notebook.html"
    path.write_text(f"<body style='width: 900px'>{to_html(run('v-half', 4, 8))}", encoding="utf-8")
    browser.get(path.as_uri())
    browser.switch_to.frame(0)
    try:
        page = "const page = document.documentElement; return [page.scrollHeight, page.clientHeight]"
        needed, shown = browser.execute_script(page)
        assert needed <= shown < needed + 60
        assert browser.execute_script("return document.querySelector('canvas').width") > 100
        assert browser.execute_script("return document.querySelector('body > .hint').offsetParent === null")
    finally:
        browser.switch_to.default_content()


def test_pointing_at_idle_time_and_beside(run, open_page):
    page = open_page(run("1f1b", 4, 8))
    last_forward, first_backward = page.locate("0F3"), page.locate("0B0")
    between = (last_forward["x"] + first_backward["x"]) / 2
    assert page.point_at(between, first_backward["y"]) == [
        "device 0 is idle",
        "4 to 10 (6)",
        "waits for 1B0 of device 1, which ends at 10",
        "holds 1",
    ]
    end = page.locate("0B7")
    assert page.point_at(end["x"], page.locate("3B7")["y"])[:3] == [
        "device 3 is idle",
        "27 to 33 (6)",
        "nothing more to run",
    ]
    assert page.point_at(20, end["y"]) == []


def test_the_slider_moves_through_time(run, open_page):
    page = open_page(run("1f1b", 4, 8))
    assert page.text("now").endswith("the fullest holds 1"), "the page opens at the peak"
    slider = page.driver.find_element("id", "time")
    before = page.colour_at(page.locate("0F0")["left"] + 3, page.locate("3F0")["y"])
    ActionChains(page.driver, duration=0).move_to_element(slider).click().perform()
    page.settle()
    time, rest = page.text("now").removeprefix("t = ").split(": ")
    assert float(time) == pytest.approx(16.5, abs=0.2)
    assert rest == "4 of 4 devices work, the fullest holds 1"
    slider.send_keys(Keys.END)
    page.settle()
    assert page.text("now").startswith("t = 33: 0 of 4 devices work, the fullest holds 0")
    slider.send_keys(Keys.HOME)
    page.settle()
    assert page.colour_at(page.locate("0F0")["left"] + 3, page.locate("3F0")["y"]) == before


def test_zoom_drag_and_find(run, open_page):
    page = open_page(run("1f1b", 4, 64))
    start, end = page.view()
    assert (start, end) == (0, 201)
    width = page.locate("0F0")["width"]
    page.driver.find_element("id", "in").click()
    page.settle()
    start, end = page.view()
    assert end - start == pytest.approx(100.5)
    assert page.locate("0F0")["width"] == pytest.approx(2 * width)

    middle = page.locate("0B20")
    chain = ActionChains(page.driver, duration=0)
    chain.w3c_actions.pointer_action.move_to_location(round(middle["x"]), round(middle["y"]))
    chain.click_and_hold().move_by_offset(100, 0).release().perform()
    page.settle()
    moved = page.locate("0B20")
    assert moved["x"] == pytest.approx(middle["x"] + 100, abs=1.5)
    assert page.view()[1] - page.view()[0] == pytest.approx(100.5)

    page.driver.find_element("id", "find").send_keys("2B60")
    page.settle()
    bar = page.locate("2B60")
    canvas = page.script("const b = document.querySelector('canvas').getBoundingClientRect(); return [b.left, b.right]")
    assert canvas[0] < bar["x"] < canvas[1] and bar["width"] > 40
    assert page.point_at(bar["x"], bar["y"])[0] == "2B60: full backward"

    page.driver.find_element("id", "fit").click()
    page.settle()
    assert page.view() == (0, 201)
    page.driver.find_element("tag name", "body").send_keys("+")
    assert page.view()[1] - page.view()[0] == pytest.approx(100.5)


def test_compared_runs_share_time_and_zoom(run, open_page):
    longer, shorter = run("1f1b", 4, 8), run("zbv", 4, 8)
    page = open_page(longer, shorter)
    scale = page.locate("0F0", 0)["width"]  # one second
    last = shorter.schedule.orders[0][-1]
    assert page.locate(last, 1)["left"] - page.locate("0F0", 1)["left"] == pytest.approx(
        scale * DrawnRun(shorter).rows[0][-1].start, abs=0.1
    )
    page.driver.find_element("id", "in").click()
    page.settle()
    assert page.locate("0F0", 0)["width"] == pytest.approx(2 * scale)
    assert page.locate("0F0", 1)["width"] == pytest.approx(scale)  # half a stage's worth, on the same axis
    assert "1f1b: " in page.text("now") and "zbv: " in page.text("now")
