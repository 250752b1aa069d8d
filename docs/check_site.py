"""Opens every page of the built site in a headless browser: ``python docs/check_site.py out/docs``.

From the first page it follows all links, with their anchors. Each page must fit into windows of
1280 and of 390 pixels, its pictures must load, and its text must be readable in light and in dark.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from typing import Any

CHECKER = Path(__file__).with_suffix(".html")
PATIENCE = 240.0  # seconds: all pages
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000"]


class Handler(SimpleHTTPRequestHandler):
    """Serves the site and the page that checks it, and receives what that page has found."""

    found: Queue[Any] = Queue()

    def do_GET(self) -> None:
        if self.path != "/check":
            super().do_GET()
            return
        page = CHECKER.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def do_POST(self) -> None:
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


def open_pages(site: Path, browser: str) -> dict[str, Any]:
    """Returns the faults, the paths of the opened pages and the number of links."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, *OPTIONS, f"--user-data-dir={profile}"]
        chromium = subprocess.Popen(
            [*command, f"http://127.0.0.1:{server.server_port}/check"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return Handler.found.get(timeout=PATIENCE)
        except Empty:
            return {"faults": [f"the browser did not end in {PATIENCE:.0f} s"], "pages": []}
        finally:
            chromium.kill()
            chromium.wait()
            server.shutdown()


def main() -> None:
    site = Path(sys.argv[1])
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("there is no Chromium: the pages of the site are not opened")
        return
    found = open_pages(site, browser)
    files = {f"/{page.relative_to(site).as_posix()}" for page in site.rglob("*.html")}
    lost = sorted(files - {*found["pages"]})
    faults = found["faults"] + [f"{page}: no link leads to this page" for page in lost]
    if faults:
        sys.exit("\n".join(faults))
    print(f"{len(files)} pages of {site} are right; {found['links']} links were followed")


if __name__ == "__main__":
    main()
