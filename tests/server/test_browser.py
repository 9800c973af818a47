"""The page in a real browser: Chromium without a screen, driven as a person would."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from serverprocess import ServerProcess

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("COLIBRI_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=f"no browser: none of {', '.join(NAMES)}")

DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 375, "height": 740}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Any]:
    """Opens pages of their own state; a script error or a refusal of the policy fails the test."""
    complaints: list[str] = []
    contexts = []

    def open_page(url: str, viewport: dict[str, int] = DESKTOP, expected: str = "") -> Page:
        contexts.append(browser.new_context(viewport=viewport))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda message: (
                message.type == "error"
                and not (expected and expected in message.text)
                and complaints.append(message.text)
            ),
        )
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def ask(page: Page, text: str, longest: int = 16) -> None:
    """Send a message that is answered greedily."""
    page.evaluate(
        "longest => { $('temperature').value = 0; $('longest').value = longest; }", longest
    )
    page.fill("#text", text)
    page.press("#text", "Enter")


def ready(page: Page) -> None:
    page.wait_for_selector("#pill:has-text('ready')")


def until(page: Page, condition: str) -> None:
    """Wait until a JavaScript expression holds (the page's policy forbids Playwright's own way)."""
    pause = "await new Promise(resolve => setTimeout(resolve, 50))"
    page.evaluate(f"async () => {{ while (!({condition})) {pause}; }}")


def test_a_conversation(server: ServerProcess, open_page: Any) -> None:
    page = open_page(server.url)
    ready(page)
    assert page.inner_text("#model option:checked") == "qwen"
    ask(page, "Tell <b>me</b>")
    page.wait_for_selector(".assistant .facts:text-matches('tokens')")
    turns = json.loads(page.evaluate("sessionStorage.getItem('turns')"))
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={
            "model": "qwen",
            "messages": [{"role": "user", "content": "Tell <b>me</b>"}],
            "max_tokens": 16,
            "temperature": 0,
        },
        timeout=60,
    ).json()["choices"][0]["message"]
    assert turns[0] == {"role": "user", "content": "Tell <b>me</b>"}
    assert turns[1]["content"] == answer["content"]
    assert turns[1]["reasoning"] == answer.get("reasoning_content", "")
    assert page.inner_text(".user .body") == "Tell <b>me</b>"
    page.reload()
    assert page.inner_text(".user .body") == "Tell <b>me</b>"  # it is still there
    page.keyboard.press("Alt+n")
    page.wait_for_selector(".welcome")
    assert page.evaluate("sessionStorage.getItem('turns')") == "[]"


def endless(page: Page) -> None:
    """From now on, replies go on until they are as long as they may be."""
    bias = {"logit_bias": {"256": -100, "257": -100, "258": -100}}
    page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(
            post_data=json.dumps({**json.loads(route.request.post_data), **bias})
        ),
    )


def test_a_reload_in_the_middle_of_a_reply(server: ServerProcess, open_page: Any) -> None:
    page = open_page(server.url)
    ready(page)
    endless(page)
    ask(page, "Tell me all", longest=3500)
    page.wait_for_selector(".assistant .body p")
    page.reload()
    assert page.inner_text(".user .body") == "Tell me all"
    assert page.inner_text(".assistant .body")
    assert page.inner_text(".assistant .facts") == "stopped"
    assert page.is_visible(".under button:text-is('Again')")


def test_a_lost_connection(server: ServerProcess, open_page: Any) -> None:
    page = open_page(server.url, expected="ERR_FAILED")
    ready(page)
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "Hi")
    page.wait_for_selector(".failed:text-is('The connection to the server was lost.')")


def test_figures_of_a_model_that_is_not_open(
    qwen: Path, mixtral: Path, tmp_path: Path, open_page: Any
) -> None:
    with ServerProcess(tmp_path, "-m", f"qwen={qwen}", "-m", f"mixtral={mixtral}") as server:
        server.wait_for("is open")
        page = open_page(server.url)
        ready(page)
        ask(page, "Hi")
        page.wait_for_selector("#speed-note:text-matches('tokens so far')")
        page.wait_for_selector("#bars section")
        page.select_option("#model", "mixtral")
        page.wait_for_selector("#no-map:text-matches('not open')")
        assert page.inner_text("#speed") == "\N{EN DASH}"
        assert page.inner_text("#speed-note") == page.inner_text("#bars") == ""
        page.close()


def test_the_cursor_is_where_the_text_ends(server: ServerProcess, open_page: Any) -> None:
    page = open_page(server.url)
    found = page.evaluate(
        """texts => texts.map(text => {
            const box = document.createElement("div");
            box.append(markdown(text));
            return endOf(box).tagName;
        })""",
        ["", "a", "- one\n- two", "```\ncode", "a `b`"],
    )
    assert found == ["DIV", "P", "LI", "PRE", "P"]


def test_stopping(server: ServerProcess, open_page: Any) -> None:
    page = open_page(server.url)
    ready(page)
    endless(page)
    ask(page, "Tell me all", longest=3500)
    page.wait_for_selector(".assistant .body:not(:empty)")
    assert page.is_hidden("#send")
    page.keyboard.press("Escape")
    page.wait_for_selector(".assistant .facts:text('stopped')")
    assert page.is_visible("#send")
    # The server has stopped too.
    page.wait_for_selector("#requests:text-is('no requests')")


def test_the_map_of_experts(server: ServerProcess, open_page: Any) -> None:
    page = open_page(server.url)
    ready(page)
    ask(page, "Tell me")
    page.wait_for_selector(".assistant .facts:text-matches('tokens')")
    experts = httpx.get(f"{server.url}/api/state").json()["experts"]
    layers, count = len(experts["layers"]), experts["count"]
    assert page.inner_text("#geometry").startswith(f"{layers} layers")
    until(page, "cells !== null && [...cells].some(cell => (cell & 63) > 0)")
    in_ram = page.evaluate("[...cells].filter(cell => cell >> 6 === RAM).length")
    assert page.evaluate("cells.length") == layers * count
    assert f"{in_ram} in RAM" in page.text_content("#tiers")
    # What is painted is what was told.
    for number in (0, layers * count - 1):
        painted = page.evaluate(
            """number => {
                const layer = Math.floor(number / geometry.count), expert = number % geometry.count;
                const [x, y] = [grid.x[expert] + 2, grid.y[layer] + 2];
                const pixel = $("cells").getContext("2d").getImageData(x, y, 1, 1).data;
                return [`rgb(${[...pixel].slice(0, 3)})`, colours()[cells[number]]];
            }""",
            number,
        )
        assert painted[0] == painted[1]
    box = page.locator("#stack").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 1.5 / count, box["y"] + box["height"] * 0.5 / layers)
    assert page.inner_text("#tip").startswith(f"Layer {experts['layers'][0]}, expert 1\n")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(server: ServerProcess, browser: Browser, open_page: Any, scheme: str) -> None:
    page = open_page(server.url, PHONE)
    page.emulate_media(color_scheme=scheme)
    ready_or_not = page.wait_for_selector("#model option", state="attached")
    assert ready_or_not is not None
    for view in ("chat", "experts"):
        page.click(f".views [data-view={view}]")
        assert page.is_visible(f"#{view}")
        width = page.evaluate(
            "Math.max(...[...document.querySelectorAll('body *')]"
            ".filter(e => e.checkVisibility() && !e.closest('.sr, .tip'))"
            ".map(e => e.getBoundingClientRect().right))"
        )
        assert width <= PHONE["width"] + 1
    assert page.evaluate("isDark()") == (scheme == "dark")
    page.click("#open-drawer")
    page.click("#appearance label:has-text('Dark')")
    assert page.evaluate("isDark()")
    page.reload()
    assert page.evaluate("isDark()")  # the choice is kept
    page.click("#open-drawer")
    page.keyboard.press("Escape")
    assert page.is_hidden("#drawer")


def test_text_of_models_is_never_markup(server: ServerProcess, open_page: Any) -> None:
    page = open_page(server.url)
    hostile = (
        '<img src=x onerror="document.title=1"> <script>document.title = 1</script>\n'
        "[link](javascript:alert(1)) [site](https://example.org/a_b) `<i>`\n"
        "```html\n<b>code</b>\n```\n| a | b |\n|---|---|\n| <u>1</u> | **2** |\n"
        "- one\n  - two\n1. three"
    )
    seen = page.evaluate(
        """text => {
            const box = document.createElement("div");
            box.append(markdown(text));
            const all = [...box.querySelectorAll("*")];
            return {
                tags: [...new Set(all.map(element => element.tagName.toLowerCase()))].sort(),
                links: [...box.querySelectorAll("a")].map(link => link.href),
                text: box.textContent,
            };
        }""",
        hostile,
    )
    assert seen["links"] == ["https://example.org/a_b"]
    assert seen["tags"] == sorted(
        ["a", "br", "code", "li", "ol", "p", "pre", "strong", "table", "td", "th", "tr", "ul"]
    )
    for part in (
        '<img src=x onerror="document.title=1">',
        "<b>code</b>",
        "<u>1</u>",
        "javascript:",
    ):
        assert part in seen["text"]


def test_a_server_that_wants_a_key(qwen: Path, tmp_path: Path, open_page: Any) -> None:
    with ServerProcess(tmp_path, "-m", f"qwen={qwen}", "--api-key", "secret") as server:
        server.wait_for("is open")
        page = open_page(server.url, expected="401")
        page.wait_for_selector("#drawer[open]")
        assert page.inner_text("#pill") == "needs a key"
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        page.keyboard.press("Escape")
        ready(page)
        ask(page, "Hi")
        page.wait_for_selector(".assistant .facts:text-matches('tokens')")
        page.close()


def test_all_can_be_reached_with_the_keyboard(server: ServerProcess, open_page: Any) -> None:
    page = open_page(server.url)
    ready(page)
    assert page.evaluate("document.activeElement.id") == "text"
    reached = set()
    for _ in range(14):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"model", "fresh", "theme", "open-drawer"} <= reached
    names = page.evaluate(
        "[...document.querySelectorAll('button, select, textarea, input')].filter(e => "
        "!(e.ariaLabel || e.textContent.trim() || e.labels?.length)).map(e => e.outerHTML)"
    )
    assert names == []
