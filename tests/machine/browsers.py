"""A real browser for tests of pages, installed if the machine allows it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from debian import why_missing


def start_browser(webdriver):
    """Return a headless Chromium or Firefox of this machine, or ``None``."""
    for names, driver in (
        (("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"), "chromedriver"),
        (("firefox", "firefox-esr"), "geckodriver"),
    ):
        browser, service = next(filter(None, map(shutil.which, names)), None), shutil.which(driver)
        if not (browser and service):
            continue
        if driver == "chromedriver":
            options = webdriver.ChromeOptions()
            for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
                options.add_argument(argument)
            options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
            options.binary_location = browser
            return webdriver.Chrome(options, webdriver.ChromeService(service))
        options = webdriver.FirefoxOptions()
        options.add_argument("--headless")
        options.binary_location = browser
        return webdriver.Firefox(options, webdriver.FirefoxService(service))
    return None


@pytest.fixture(scope="module")
def browser() -> Iterator:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.common.exceptions import WebDriverException

    try:
        driver = start_browser(webdriver)
        if driver is None:
            if reason := why_missing(("chromium", "chromedriver"), ("chromium", "chromium-driver")):
                pytest.skip(reason)
            driver = start_browser(webdriver)
    except WebDriverException as error:
        pytest.skip(f"the browser does not start: {error.msg}")
    driver.set_window_size(1300, 900)
    yield driver
    driver.quit()
