"""A real browser, driven over the pipe of its DevTools protocol. It has no network but this machine's own."""

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = ("--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run",
          "--disable-background-networking", "--disable-dev-shm-usage", "--hide-scrollbars")  # fmt: skip

# Pieces of text in one picture that lie over each other, texts that are cut off, a page that is too wide, and words of
# tables (of closed ones, too) that are broken into less than four letters a line.
FAULTS = """(() => {
  const found = [], wide = document.documentElement.scrollWidth - innerWidth;
  if (wide > 0) found.push(`the page is ${wide} px too wide`);
  for (const svg of document.querySelectorAll(".plot > svg")) {
    const texts = [...svg.querySelectorAll("text")].map((t) => [t.firstChild.data, t.getBoundingClientRect()]);
    const room = svg.closest(".plot").getBoundingClientRect(), id = svg.closest(".scroll").id;
    texts.forEach(([a, p], n) => {
      if (p.left < room.left - 1 || p.right > room.right + 1) found.push(`${id}: "${a}" leaves its plot`);
      for (const [b, q] of texts.slice(n + 1)) {
        const x = Math.min(p.right, q.right) - Math.max(p.left, q.left);
        const y = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
        if (x > 1 && y > 3) found.push(`${id}: "${a}" lies over "${b}"`);
      }
    });
  }
  const closed = [...document.querySelectorAll("details:not([open])")], range = document.createRange();
  for (const each of closed) each.open = true;
  for (const cell of document.querySelectorAll("tr:nth-child(-n+30) > *")) {
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) for (const word of texts.currentNode.data.matchAll(/[!-~]{4,}/g)) {
      range.setStart(texts.currentNode, word.index);
      range.setEnd(texts.currentNode, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map((each) => each.top)).size;
      if (lines > 1 && word[0].length < 4 * lines) found.push(`a table breaks "${word[0]}" into ${lines} lines`);
    }
  }
  for (const each of closed) each.open = false;
  return found;
})()"""


class Browser:
    def __init__(self) -> None:
        assert CHROMIUM
        self.home = tempfile.mkdtemp(prefix="browser-")
        self.complaints: list[str] = []
        self._number, self._session, self._data = 0, "", b""
        shell = ["sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1', "sh"]
        self._process = subprocess.Popen(
            [*shell, CHROMIUM, *_FLAGS, f"--user-data-dir={self.home}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout
        self._answers = select.poll()  # unlike select(), whatever the number of the handle
        self._answers.register(self._process.stdout, select.POLLIN)
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, seconds: float = 60.0, **parameters: Any) -> dict[str, Any]:
        """A call of the protocol, and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        assert self._process.stdin
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        self._process.stdin.flush()
        end = time.monotonic() + seconds
        while True:
            answer = self._next(end, method)
            self._listen(answer)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str, width: int = 1200, height: int = 900, dark: bool = False) -> float:
        """Load a page; the seconds until it is complete."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])
        self("Page.navigate", url="about:blank")
        while self.say("location.href") != "about:blank":
            time.sleep(0.01)
        self.complaints.clear()
        began = time.monotonic()
        self("Page.navigate", url=url)
        while not self.say("document.readyState === 'complete' && location.href !== 'about:blank'"):
            time.sleep(0.01)
        return time.monotonic() - began

    def say(self, script: str) -> Any:
        """What a piece of JavaScript comes to in the page."""
        answer = self("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def picture(self, file: Path, whole: bool = True) -> None:
        data = self("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def _next(self, end: float, method: str) -> dict[str, Any]:
        assert self._process.stdout
        while b"\0" not in self._data:
            ready = self._answers.poll(1000 * max(0.0, end - time.monotonic()))
            assert ready, f"{method}: the browser did not answer in time"
            part = os.read(self._process.stdout.fileno(), 1 << 20)
            assert part, f"{method}: the browser has ended"
            self._data += part
        line, _, self._data = self._data.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _listen(self, message: dict[str, Any]) -> None:
        about = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(about["args"]))
            case "Runtime.exceptionThrown":
                self.complaints.append(str(about["exceptionDetails"]))
            case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe and pipe.close()
        shutil.rmtree(self.home, ignore_errors=True)


def looks_right(browser: Browser, url: str, *ids: str) -> None:
    """On a telephone and on a wall, by day and by night."""
    for width, dark in ((400, False), (400, True), (1600, False)):
        browser.open(url, width, dark=dark)
        assert browser.complaints == [] and browser.say(FAULTS) == [], f"at {width} px"
        assert browser.say("document.querySelectorAll('h1').length") == 1
        for id in ids:
            high = f"document.querySelector('#{id} .plot > svg').getBoundingClientRect().height"
            assert browser.say(high) > 20, f"{id}: no picture"
        paper = browser.say("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(18, 23, 27)") == dark
