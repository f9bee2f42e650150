"""Pages in a real browser, with no network."""

from pathlib import Path
from typing import Any

from tests.patience import PATIENCE


def opened(browser: Any, path: Path, scheme: str = "light") -> Any:
    """The page, after checking that it asked for nothing but itself and complained of nothing.

    All files that a browser opens share one tab, because each further one would be a process: use a page before the next is opened.
    """
    if not browser.contexts:
        context = browser.new_context(offline=True, viewport={"width": 1280, "height": 800})
        context.set_default_timeout(PATIENCE * 1000)
        context.new_page()
    [page] = browser.contexts[0].pages
    page.emulate_media(color_scheme=scheme)
    requests: list[str] = []
    complaints: list[str] = []
    listeners = {
        "request": lambda request: requests.append(request.url),
        "console": lambda message: complaints.append(message.text),
        "pageerror": lambda error: complaints.append(str(error)),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    page.goto(path.as_uri())
    page.wait_for_load_state("networkidle")
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    assert requests == [path.as_uri()]
    assert complaints == []
    return page


def drawn(page: Any) -> list[str]:
    """Names of the charts, each of which must have been drawn."""
    names: list[str] = page.eval_on_selector_all(".plot", "plots => plots.map(plot => plot.id)")
    for name in names:
        assert page.locator(f"#{name} .main-svg .trace, #{name} .main-svg .point").count() > 0, name
    return [name.removeprefix("plot-") for name in names]
