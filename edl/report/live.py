# SPDX-License-Identifier: Apache-2.0
"""The live page of a job: the report while the job trains, served on loopback by a process of its own.

    GET /TOKEN/            the page: almost empty, so it is painted at once
    GET /TOKEN/live.js     its script, which asks for the following twice a second
    GET /TOKEN/now         phase, progress, results and workers as HTML, their age and that of the pictures
    GET /TOKEN/pictures    the pictures as HTML

No request changes anything. This process reads the journal's file and asks the master for its status, as
`edl status` does. So the master serves no browsers, needs no Matplotlib, and does no work while no browser
asks. Pictures are drawn by one thread, only while a browser asks for them.

Promise: each number and picture is as old as its age says. Ages are seconds since the status or the journal
was read; while the master does not answer, the pictures are as old as its last status. An ended job is shown
from its summary alone: the numbers that come with `final` are the last ones.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edl.contract import artifacts
from edl.contract.modes import HOROVOD
from edl.contract.phases import ENDED
from edl.errors import EdlError
from edl.formatting import how_many, one_line, plain
from edl.report.results import audited, boxes, results
from edl.report.strip import strip
from edl.report.tables import style, table, text_of
from edl.report.timeline import COMMITS, RECORDS, Timeline, duration

if TYPE_CHECKING:
    from edl.report.reading import Following

STATUS_SECONDS = 0.4  # a status that is younger is not asked for again, however many browsers ask
WATCHED_SECONDS = 10.0  # after the last request, pictures are drawn no more
REST = 4  # drawing takes at most one part in 1 + REST of the time of a processor
MIN_PAUSE_SECONDS = 1.0  # between two drawings
LAST_SECONDS = 20.0  # for the pictures of a job that has ended with `edl run --ui`
MAX_WORKERS = 200  # rows of the table of workers
CLIENT_SECONDS = 10.0  # within which a client must send its request
SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Reading(NamedTuple):
    """A job that can be read: the directory with its journal, and its status or summary."""

    directory: Path
    told: Mapping[str, Any]


class Status(NamedTuple):
    """The status of a job, or its summary once it has ended, and how many seconds ago it was written."""

    told: Mapping[str, Any]
    age: float = 0.0


class Job:
    """What the page shows of one job.

    Args:
        name: the job's name for people.
        status: returns the job's status. It may raise EdlError.
        journal: gives access to the job's journal. It may raise EdlError.
    """

    def __init__(
        self,
        name: str,
        status: Callable[[], Status],
        journal: Callable[[], AbstractContextManager[Reading]],
    ) -> None:
        self.name = name
        self._status, self._journal = status, journal
        self._asking = threading.Lock()  # of the job: a connection to a cluster serves one thread at a time
        self._told: Mapping[str, Any] = {"phase": "unknown"}  # the last status
        self._told_at: float | None = None  # when that was true; None: before the first one
        self._asked_at = float("-inf")
        self._trouble = ""  # why the newest status could not be read
        self._wanted = threading.Condition()
        self._looked_at = float("-inf")
        self._following: Following | None = None  # the journal that was read last
        self._directory: Path | None = None  # of that journal
        self._timeline: Timeline | None = None  # of that journal
        self._read_at, self._read_again = float("-inf"), float("-inf")  # when it was read, and will be
        self._ring = ""  # ring and workers, drawn from the timeline
        self.pictures, self.version, self._final = "", 0, False
        self._drawn_to: float | None = None  # the end of the timeline that the pictures show
        self._drawn_at = float("-inf")  # when the journal was read that the pictures show
        self._undrawn = ""  # why the newest pictures could not be drawn
        self._hurry = threading.Event()  # set: draw without a pause
        self._seen = threading.Event()  # set once a browser has been told that the pictures are final

    def now(self) -> dict[str, Any]:
        """The answer to /now. It also records that a browser asks."""
        with self._wanted:
            self._looked_at = time.monotonic()
            self._wanted.notify_all()
        with self._asking:
            self._ask()
            told, trouble = self._told, self._trouble
            final = self._final and told["phase"] in ENDED  # a job that is resumed trains again
        if final:
            self._seen.set()
        return {
            "title": plain(f"{'no answer' if trouble else told['phase']}: {self.name}"),
            "state": self._state(told, trouble, final),
            "now": now(told, trouble, "" if final else self._ring),
            "version": self.version,
            "ages": self._ages(told, final),
            "final": final,
        }

    def _ask(self) -> None:
        """Read status and journal if the last ones are old. Without an answer, they stay and age."""
        began = time.monotonic()
        if began - self._asked_at < STATUS_SECONDS:
            return
        try:
            self._told, age = self._status()
            self._told_at, self._trouble = began - age, ""
            if began >= self._read_again:
                self._read(began)
        except (EdlError, OSError) as error:  # a journal that is being renamed, or a lost connection
            self._trouble = one_line(str(error))
        self._asked_at = time.monotonic()

    def _read(self, now: float) -> None:
        """Read the new lines of the journal, and draw ring and workers."""
        with self._journal() as found:
            copied = found.directory != self._directory
            if artifacts.journals(found.directory):
                self._timeline = self._follow(found.directory)
                self._ring, self._read_at = strip(self._timeline), now
        if copied:  # the whole journal of a release, for which its pod is not asked all the time
            self._read_again = 2 * time.monotonic() - now

    def _follow(self, directory: Path) -> Timeline:
        from edl.report import reading  # imported late: with NumPy, which takes a while

        following, self._following = self._following, None  # after an error, read it all again
        if following is None or self._directory != directory:
            following = reading.Following(directory)
        timeline = following.read()
        self._following, self._directory = following, directory
        return timeline

    def _state(self, told: Mapping[str, Any], trouble: str, final: bool) -> str:
        """Say in a sentence what the page shows."""
        if final:
            return "The job has ended; this page is complete."
        if self._undrawn:
            return f"The pictures are not drawn: {self._undrawn}"
        if trouble:
            return "No answer from the job: the page shows its last known state."
        if told["phase"] in ENDED:
            return "The job has ended; its last pictures are being drawn."
        return "Live: follows the job." if self.version else "Live: the pictures are being drawn."

    def _ages(self, told: Mapping[str, Any], final: bool) -> dict[str, float]:
        """Seconds since the numbers (`now`), ring and workers (`ring`) and `pictures` were true.

        What is final, or not there yet, has no age.
        """
        moment, ages = time.monotonic(), {}
        if self._told_at is not None and told["phase"] not in ENDED:
            ages["now"] = moment - self._told_at
        # While the master does not answer, a journal that does not grow says nothing about the present.
        if self._ring and not final:
            ages["ring"] = max(moment - self._read_at, ages.get("now", 0.0))
        if self.version and not final:
            ages["pictures"] = max(moment - self._drawn_at, ages.get("now", 0.0))
        return ages

    def draw(self, ends: threading.Event) -> None:
        """Draw the pictures while a browser asks for them, until `ends` is set."""
        with suppress(ImportError):  # which is reported when pictures are drawn
            from edl.report import page as page  # Matplotlib takes longest: load it before a browser asks
        while not ends.is_set():
            with self._wanted:
                if time.monotonic() - self._looked_at > WATCHED_SECONDS:
                    self._wanted.wait(MIN_PAUSE_SECONDS)
                    continue
            began = time.thread_time()  # not wall time: on a busy machine, pictures would come late
            self._draw()
            self._hurry.wait(max(MIN_PAUSE_SECONDS, REST * (time.thread_time() - began)))
            self._hurry.clear()

    def show_the_end(self) -> None:
        """Wait until a browser that follows an ended job has the final pictures, for at most LAST_SECONDS."""
        with self._wanted:
            watched = time.monotonic() - self._looked_at <= WATCHED_SECONDS
        if watched:
            self._hurry.set()
            if self._seen.wait(LAST_SECONDS):
                time.sleep(MIN_PAUSE_SECONDS)  # within which the browser fetches the pictures

    def wake(self) -> None:
        """End a pause of `draw`."""
        self._hurry.set()

    def _draw(self) -> None:
        """Draw the pictures if the journal has changed since they were drawn."""
        try:
            with self._asking:
                self._ask()
                told, timeline, read_at = self._told, self._timeline, self._read_at
            if told["phase"] in ENDED:
                self._draw_the_end()
            elif timeline is not None:
                if timeline.ends != self._drawn_to:
                    self._show(timeline, told)
                self._drawn_at, self._undrawn, self._final = read_at, "", False
        except (EdlError, OSError) as error:
            self._undrawn = one_line(str(error))

    def _draw_the_end(self) -> None:
        """Draw all pictures of an ended job, which need its journal as a whole."""
        if self._final:
            return
        from edl.report import write

        with ExitStack() as journal:
            with self._asking:
                found = journal.enter_context(self._journal())
                # The master reports the end a moment before it writes the summary.
                if found.told.get("phase") not in ENDED or not artifacts.has_ended(found.directory):
                    return
                timeline = self._follow(found.directory)
            # Drawing takes seconds; meanwhile, requests for the status are answered.
            self._show(timeline, found.told, write.verdict(found.directory))
        with self._asking:  # the numbers of a final page are those of its pictures
            self._timeline, self._told, self._trouble, self._undrawn = timeline, found.told, "", ""
            self._final = True

    def _show(self, timeline: Timeline, told: Mapping[str, Any], verdict: str = "") -> None:
        from edl.report import write

        live = told["phase"] not in ENDED
        self.pictures = audited(verdict) + write.sections(timeline, told, live)
        self.version, self._drawn_to = self.version + 1, timeline.ends


def now(told: Mapping[str, Any], trouble: str = "", ring: str = "") -> str:
    """Describe the present state of a job as HTML: phase, progress, loss, metrics and workers.

    Args:
        trouble: why a newer status could not be read; empty: this is the newest one.
        ring: ring and workers over time, drawn.
    """
    task, records = told.get("task") or {}, told.get("records") or {}
    parts = [f"<p><strong>{text_of(told['phase'])}</strong>: {text_of(told.get('reason', ''))}</p>"]
    if trouble:
        parts.append(f'<p class="bad">{text_of(trouble)}</p>')
    if task.get("steps"):
        step = task.get("step", task.get("steps_done")) or 0
        facts = [f"step {step:,} of {task['steps']:,}"]
        if (rate := told.get("rate")) is not None:
            facts.append(f"{_number(rate)} records/s")
        if (eta := told.get("eta_seconds")) is not None:
            facts.append(f"ETA {duration(eta)}")
        total, applied = records.get("total") or 0, records.get("applied") or 0
        share = applied / total if total else step / task["steps"]
        parts.append(
            f'<p><progress max="1" value="{share:.4f}" aria-label="Progress">{share:.0%}</progress> '
            f"{text_of(', '.join(facts))}</p>"
        )
    parts.append(boxes(results(told)))
    parts += [
        f'<p class="bad">{text_of(part)}: {text_of(why)}</p>'
        for part, why in (told.get("degraded") or {}).items()
    ]
    parts.append(ring)
    if rows := told.get("workers"):
        parts.append(_workers(rows, COMMITS if task.get("kind") == HOROVOD else RECORDS))
    return "".join(parts)


def _workers(rows: Sequence[Mapping[str, Any]], counted: str) -> str:
    """Count the workers by state. If they are many, list those that need a look first.

    Args:
        counted: what their rates count: records or commits.
    """
    ordered, title = list(rows), f"{how_many(len(rows), 'worker')} now"
    if len(rows) > MAX_WORKERS:
        ordered.sort(key=lambda worker: (worker["rank"] is not None, worker["rate"]))
        title += f": the {MAX_WORKERS} that are not in the ring or are the slowest"
    shown = [
        (
            w["id"],
            w["handle"],
            "" if w["rank"] is None else w["rank"],
            w["state"],
            w["step"],
            _number(w["rate"]),
        )
        for w in ordered[:MAX_WORKERS]
    ]
    columns = ("#worker", "pid or pod", "#rank", "state", "#step", f"#{counted}/s")
    counts = Counter(str(worker["state"]) for worker in rows)
    states = "workers: " + ", ".join(f"{state} {count:,}" for state, count in counts.most_common())
    return f"<p>{text_of(states)}</p>{table(title, columns, shown)}"


def page(name: str) -> str:
    """The page without content, which its script fetches."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text_of(name)}</title><style>{style()}</style>"
        '<script src="live.js" defer></script></head><body>'
        f'<header><h1>{text_of(name)}</h1><p class="muted" id="state" role="status">Loading.</p>'
        '<div id="now"></div></header>'
        '<main id="pictures"></main>'
        "<noscript><p>This page needs JavaScript; <code>edl report</code> writes one that does not.</p>"
        "</noscript>"
        "</body></html>\n"
    )


class PageServer(ThreadingHTTPServer):
    """Serves the page on loopback.

    Args:
        port: the port; 0: any free one.
    """

    daemon_threads = True

    def __init__(self, job: Job, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.job, self.token = job, secrets.token_urlsafe(24)
        self._ends = threading.Event()
        self._drawer = threading.Thread(target=job.draw, args=(self._ends,), name="pictures", daemon=True)

    @property
    def address(self) -> str:
        """The address of the page, with its token."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def run(self) -> None:
        """Serve until `shutdown` is called in another thread."""
        self._drawer.start()
        try:
            self.serve_forever(poll_interval=0.1)
        finally:
            self._ends.set()
            self.job.wake()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that close a connection."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = CLIENT_SECONDS
    server_version, sys_version = "edl", ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        job = self.server.job
        match self._path():
            case "":
                self._send("text/html", page(job.name))
            case "live.js":
                script = resources.files("edl.report").joinpath("live.js").read_text(encoding="utf-8")
                self._send("text/javascript", script)
            case "now":
                self._send("application/json", json.dumps(job.now()))
            case "pictures":
                self._send("text/html", job.pictures)
            case _:
                self._send("text/plain", "not found\n", HTTPStatus.NOT_FOUND)

    def _path(self) -> str | None:
        """The path below the token; None if the request has a wrong token or was made for another host."""
        # A page of another site may resolve its own name to 127.0.0.1 (DNS rebinding); its Host differs.
        if self.headers.get("Host") not in {
            f"{host}:{self.server.server_port}" for host in ("127.0.0.1", "localhost")
        }:
            return None
        _, token, rest = [*self.path.split("/", 2), "", ""][:3]
        given, known = token.encode("utf-8", "surrogateescape"), self.server.token.encode()
        return (
            rest
            if hmac.compare_digest(given, known) and self.path.startswith(f"/{self.server.token}/")
            else None
        )

    def _send(self, kind: str, text: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        content = text.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in {**SECURITY, "Content-Type": f"{kind}; charset=utf-8"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log no requests: their paths contain the token."""


def _number(value: float | None) -> str:
    return f"{value or 0:,.0f}"
