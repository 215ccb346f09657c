"""A small driver of Chromium: one page in a process of its own, spoken to through a pipe.

The DevTools protocol is JSON with a zero byte after each message; the browser reads from file
descriptor 3 and writes to 4, so there is no port and no network.
"""

import base64
import json
import os
import shutil
import subprocess

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """A page of a file; `errors` collects what the console complains of."""

    def __init__(self, file, profile, width=1280, height=900, dark=False, touch=False):
        from_us, self._out = os.pipe()
        self._in, to_us = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
                 "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
                 f"--user-data-dir={profile}"]  # fmt: skip
        command = ["bash", "-c", f'exec "$@" 3<&{from_us} 4>&{to_us}', "bash", BROWSER, *flags]
        self._browser = subprocess.Popen(
            [*command, "about:blank"],
            pass_fds=(from_us, to_us),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        self._buffer, self._number, self._session, self.errors = b"", 0, None, []
        self._events = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height, touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.requests = []
        self.send("Page.navigate", url=file.as_uri())
        self._wait_for("Page.loadEventFired")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self._session = None
            self.send("Browser.close")
        finally:
            os.close(self._out)
            os.close(self._in)
            try:
                self._browser.wait(20)
            except subprocess.TimeoutExpired:
                self._browser.kill()
                self._browser.wait()

    def send(self, method, **parameters):
        """Calls a method of the protocol and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, code):
        """Returns the value of an expression in the page."""
        done = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def resize(self, width, height, touch=False):
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=touch)  # fmt: skip

    def screenshot(self, path):
        """Writes a picture of the whole page."""
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def choose(self, name, value):
        """Sets a control as a user does."""
        self.run(
            f"(() => {{ const control = document.getElementById({json.dumps(name)});"
            f"if (control.type === 'checkbox') control.checked = {json.dumps(value)};"
            f"else control.value = {json.dumps(value)};"
            "control.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )

    def point(self, selector, x, y, kind="mouseMoved"):
        """Moves the mouse to a place on an element, given in parts of its size, or clicks there."""
        left, top = self._place(selector, x, y)
        place = {"x": left, "y": top}
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **place)
        if kind == "click":
            for step in ("mousePressed", "mouseReleased"):
                self.send("Input.dispatchMouseEvent", type=step, button="left", clickCount=1,
                          **place)  # fmt: skip

    def tap(self, selector, x, y):
        """Touches a place on an element, given in parts of its size."""
        self.send("Emulation.setTouchEmulationEnabled", enabled=True)
        left, top = self._place(selector, x, y)
        self.send(
            "Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": left, "y": top}]
        )
        self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.run("new Promise((done) => setTimeout(done, 400))")  # a tap becomes a click by then

    def press(self, key, code=0):
        for step in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=step, key=key, code=key,
                      windowsVirtualKeyCode=code)  # fmt: skip

    def press_tab(self):
        self.press("Tab", 9)

    def _place(self, selector, x, y):
        return self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            f"return [b.left + b.width * {x}, b.top + b.height * {y}]; }})()"
        )

    def _wait_for(self, event):
        while not any(seen["method"] == event for seen in self._events):
            self._read()

    def _read(self):
        while b"\0" not in self._buffer:
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has gone"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self._events.append(message)
            self._note(message["method"], message["params"])
        return message

    def _note(self, method, event):
        if method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        is_complaint = method == "Runtime.exceptionThrown" or (
            method == "Log.entryAdded"
            or (method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning"))
        )
        if is_complaint:
            self.errors.append(event)
