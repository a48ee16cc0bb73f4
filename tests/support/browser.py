"""A real browser: Chromium, driven over the W3C WebDriver protocol by its own chromedriver."""

import base64
import json
import re
import shutil
import subprocess
import tempfile
import urllib.request

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key of an element's id, as the standard has it."""

KEYS = {"left": "\ue012", "right": "\ue014", "tab": "\ue004", "enter": "\ue007"}


def installed():
    """Returns whether there is a browser with its driver."""
    return all(shutil.which(name) for name in ("chromium", "chromedriver"))


class Browser:
    """A browser without a window; a context manager."""

    def __enter__(self):
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        self._url = ""
        while not self._url:
            line = self._driver.stdout.readline()
            assert line, "chromedriver ended"
            if found := re.search(r"successfully on port (\d+)", line):
                self._url = f"http://127.0.0.1:{found[1]}"
        words = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--window-size=1100,800",
        ]
        words.append(f"--user-data-dir={self._profile.name}")
        chosen = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": words, "binary": shutil.which("chromium")},
        }
        try:
            made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": chosen}})
        except BaseException:
            self._end()
            raise
        self._session = f"/session/{made['sessionId']}"
        return self

    def __exit__(self, *error):
        try:
            self._ask("DELETE", self._session)
        finally:
            self._end()

    def _end(self):
        self._driver.terminate()
        self._driver.wait(30)
        self._driver.stdout.close()
        self._profile.cleanup()

    def _ask(self, method, path, body=None):
        data = None if method != "POST" else json.dumps(body or {}).encode()
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, url):
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script, *arguments):
        """Returns what a JavaScript function's body returns."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": arguments})

    def wait_for(self, script, *arguments):
        """Runs a script that returns a promise until it is kept."""
        return self._ask("POST", f"{self._session}/execute/async", {"script": script, "args": arguments})

    def click(self, selector):
        found = self._ask("POST", f"{self._session}/element", {"using": "css selector", "value": selector})
        self._ask("POST", f"{self._session}/element/{found[ELEMENT]}/click")

    def press(self, key):
        """Presses and releases a key, wherever the focus is."""
        key = KEYS.get(key, key)
        actions = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        chain = {"type": "key", "id": "keyboard", "actions": actions}
        self._ask("POST", f"{self._session}/actions", {"actions": [chain]})

    def picture(self):
        """Returns a picture of the page, as PNG."""
        return base64.b64decode(self._ask("GET", f"{self._session}/screenshot"))
