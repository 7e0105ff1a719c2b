"""The files of one segment of a run: opened by one process, flushed in time, never silently incomplete.

A flusher thread hands rows to the operating system, so that a disk delays no step, a long step delays nothing
and a killed process loses less than a second of rows. It also touches the events stream, whose age is the
heartbeat of a live run. While a C call holds the interpreter it can not run, so rows wait for as long.
Another thread asks the disk for durability every ``fsync_seconds``.

The thread that appends encodes them, one stream at a time: a flusher that did it in the middle of a step
would keep the interpreter from the training, up to the 5 ms of ``sys.getswitchinterval`` at a time. It does
so only where nothing is appended for long.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import pyarrow as pa

from recorder import schema
from recorder.errors import RecorderError
from recorder.writer import Block, Stream

ENCODE_SECONDS = 0.4
"""Rows that waited so long are encoded by the next append. A batch takes 0.3 ms, however few rows it has."""
FLUSH_SECONDS = 0.5
"""Rows wait at most this long, so that a killed process loses less than a second of them."""
MOST_WAITING_ROWS = 4096
"""Of one table: a loop of short steps must not pile up half a second of rows in memory."""
MOST_ENCODED_BYTES = 1 << 20
"""Of one table, in memory: where the flusher does not come to run, the thread that appends writes them."""
HEARTBEAT_SECONDS = 5.0

OnError = Literal["warn", "raise"]


def say(line: str) -> None:
    """One line on stderr, which may lie on the disk that is full: that must not end the training either."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        print(f"recorder: {line}", file=sys.stderr, flush=True)


class Segment:
    """Streams of one rank and segment. Appending is safe from any thread; a forked child writes nothing."""

    def __init__(self, run_directory: Path, rank: int, on_error: OnError, fsync_seconds: float) -> None:
        """Claim the next free segment number. Raises OSError when the directory can not be written."""
        self.run_directory = run_directory
        self.rank = rank
        self._on_error = on_error
        self._fsync_seconds = fsync_seconds
        self._lock = threading.RLock()  # guards what waits: held for a moment only
        self._write_lock = threading.RLock()  # guards the files; taken before the other one
        self._process = os.getpid()
        self._told: set[str] = set()
        self.is_closed = False
        self._ends = threading.Event()  # stops the threads
        self._full = threading.Event()  # wakes the flusher before its time
        self._log = run_directory / schema.LOG_DIRECTORY
        self._log.mkdir(parents=True, exist_ok=True)
        self.number, events = self._claim()
        self._streams: dict[str, Stream] = {"events": events}
        works = {"recorder-flush": self._flush_regularly}
        if fsync_seconds:
            works["recorder-sync"] = self._sync_regularly
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True) for name, work in works.items()
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:  # of threads, too, there may be no more
            self._ends.set()
            for thread in self._threads:
                if thread.is_alive():
                    thread.join()
            events.close()
            events.path.unlink()
            raise OSError(errno.EAGAIN, str(error)) from error
        atexit.register(self.close)  # for a loop that never closes its recorder

    @property
    def foreign(self) -> bool:
        """This process is a fork of the one that owns the files; it must not touch them."""
        return os.getpid() != self._process

    def open(self, table_name: str, arrow_schema: pa.Schema) -> None:
        """Create a stream with columns of the user's own. Raises RecorderError when it exists."""
        if self.foreign:
            return
        with self._lock:
            if table_name in self._streams:
                raise RecorderError(
                    f"{self.run_directory}: table {table_name} of this segment is written already"
                )
            self._streams[table_name] = Stream(self._path(table_name), arrow_schema)
        self.report()

    def append(self, blocks: Iterable[Block], flush: bool = False) -> bool:
        """Append rows; with ``flush`` they reach the operating system before this returns.

        False when the segment ends or has ended: the rows belong into the next one.
        """
        if self.foreign:
            return True
        interrupts = self._is_interrupted()
        touched = {}  # in the order of the rows
        with self._lock:
            if self._ends.is_set():
                return False
            for block in blocks:
                stream = self._streams.get(block.table)
                if stream is None:
                    arrow_schema = schema.stream(block.table).stream_schema()
                    stream = self._streams[block.table] = Stream(self._path(block.table), arrow_schema)
                stream.append(block)
                touched[block.table] = stream
        if interrupts:
            return True
        if flush:
            for table_name in touched:
                self.write(table_name)
        else:
            self._encode_one_of(touched)
        self.report()
        return True

    def write(self, table_name: str) -> None:
        """Write what waits in a stream; rows that come meanwhile wait for the next time."""
        if self._is_interrupted():
            return
        with self._write_lock:
            self._encode(table_name)
            self._write_encoded(table_name)

    def _is_interrupted(self) -> bool:
        """A signal handler is running, in the middle of its own thread's work on these streams.

        It may let rows wait, which the flusher writes soon. To write them it would have to wait for itself.
        """
        return bool(self._lock._is_owned() or self._write_lock._is_owned())  # type: ignore[attr-defined]

    def _with_parts(self, table_name: str) -> list[Stream]:
        """A stream, after those that hold parts of its rows.

        They are encoded from rows taken at one moment, and written in this order. So a kill between two
        writes costs whole rows, and leaves none whose counts of NaN are lost.
        """
        names = (*schema.WRITTEN_BEFORE.get(table_name, ()), table_name)
        return [self._streams[name] for name in names if name in self._streams]

    def _encode(self, table_name: str) -> None:
        """Make record batches of what waits. The caller has the write lock."""
        with self._lock:
            streams = self._with_parts(table_name)
            for stream in streams:
                stream.take()
        for stream in streams:
            stream.encode()

    def _write_encoded(self, table_name: str) -> None:
        """Hand record batches to the operating system. The caller has the write lock."""
        for stream in self._with_parts(table_name):
            stream.write()

    def _encode_one_of(self, streams: Mapping[str, Stream]) -> None:
        """Encode the first stream that is due, one at a time so that no append takes long."""
        for table_name, stream in streams.items():
            is_full = stream.waiting_row_count > MOST_WAITING_ROWS
            if is_full or stream.oldest_age > ENCODE_SECONDS:
                if self._write_lock.acquire(blocking=False):  # else the flusher is at the disk: next time
                    try:
                        self._encode(table_name)
                        if stream.encoded_byte_count > MOST_ENCODED_BYTES:  # the flusher does not come to run
                            self._write_encoded(table_name)
                    finally:
                        self._write_lock.release()
                if is_full:
                    self._full.set()
                return

    def flush(self) -> None:
        """Write what waits in every stream, and tell what could not be written."""
        if not self.foreign:
            self.write_all()
            self.report()

    def write_all(self) -> None:
        """Write what waits in every stream."""
        for table_name in list(self._streams):
            self.write(table_name)

    def report(self) -> None:
        """Tell once of each stream that lost rows: an event and a line on stderr, or RecorderError."""
        for stream in list(self._streams.values()):
            if stream.error is not None:
                which = "its later rows" if stream.written_row_count else "its rows"
                line = f"{stream.path}: can not write: {stream.error}; {which} are lost"
                self._tell(f"{stream.path.name} broken", line, stream.error)
            if stream.rejection is not None:
                line = f"{stream.path}: rows are lost that their columns can not hold: {stream.rejection}"
                self._tell(f"{stream.path.name} rejected", line, None)
            if stream.is_overfull:
                line = f"{stream.path}: the disk takes no rows: those that come while many wait are lost"
                self._tell(f"{stream.path.name} overfull", line, None)

    def _tell(self, what: str, line: str, error: Exception | None) -> None:
        if what in self._told:
            return
        self._told.add(what)
        if self._on_error == "raise":
            raise RecorderError(line) from error
        say(f"{line}; training goes on")
        self.warn(line)

    def warn(self, message: str) -> None:
        """Record a warning event, as long as events can be written; it does not wait for the disk."""
        row = {"wall_time": time.time_ns() // 1000, "kind": "warning", "message": message, "payload": "{}"}
        with self._lock:
            self._streams["events"].append(Block("events", 1, row))

    def size(self) -> int:
        """Bytes of the segment's files."""
        paths = [stream.path for stream in self._streams.values()]
        return sum(path.stat().st_size for path in paths if path.exists())

    def row_counts(self) -> dict[str, int]:
        """Rows that were handed to the operating system, by table."""
        return {name: stream.written_row_count for name, stream in self._streams.items()}

    def close(self) -> None:
        """Flush and close every file; say on stderr how many rows of which table are missing.

        After an interrupt, or from a signal handler that interrupts an append, a second call finishes it; the
        end of the process does if nobody else does.
        """
        if self.foreign or self.is_closed or self._is_interrupted():
            return
        with self._lock:  # from now on no row comes
            self._ends.set()
        self._full.set()
        for thread in self._threads:
            thread.join()
        try:
            self.write_all()
            self._notice_deletions()
            self.report()  # while the event that it logs can still be written
        finally:
            self._close_files()

    def _close_files(self) -> None:
        if self._fsync_seconds:
            self._sync()
        with self._write_lock:
            for stream in self._streams.values():
                stream.close()
        lost = [f"{s.lost_row_count} of {name}" for name, s in self._streams.items() if s.lost_row_count]
        if lost:
            say(f"{self.run_directory}: rows lost: {', '.join(lost)}")
        self.is_closed = True
        atexit.unregister(self.close)
        self.report()

    def _claim(self) -> tuple[int, Stream]:
        """The segment that this process owns, by creating its events stream exclusively."""
        parsed = [schema.parse_stream_name(path.name) for path in self._log.iterdir()]
        number = 1 + max((p[2] for p in parsed if p is not None and p[1] == self.rank), default=-1)
        while True:
            path = self._log / schema.stream_name("events", self.rank, number)
            stream = Stream(path, schema.EVENTS.stream_schema())
            if stream.error is None:
                return number, stream
            if not isinstance(stream.error, FileExistsError):
                raise stream.error
            number += 1  # another process was quicker

    def _path(self, table_name: str) -> Path:
        return self._log / schema.stream_name(table_name, self.rank, self.number)

    def _flush_regularly(self) -> None:
        """Runs in a thread of its own until the segment is closed."""
        beat = time.monotonic()
        while not self._ends.is_set():
            self._full.wait(FLUSH_SECONDS / 4)
            self._full.clear()
            for table_name, stream in list(self._streams.items()):
                if stream.oldest_age > FLUSH_SECONDS or stream.waiting_row_count > MOST_WAITING_ROWS:
                    self.write(table_name)
                elif stream.encoded_byte_count:
                    with self._write_lock:
                        self._write_encoded(table_name)
            now = time.monotonic()
            if now - beat > HEARTBEAT_SECONDS:
                beat = now
                self._streams["events"].touch()
                self._notice_deletions()

    def _sync_regularly(self) -> None:
        """Runs in another thread: a busy disk takes seconds for it, in which rows must not wait."""
        while not self._ends.wait(min(self._fsync_seconds, threading.TIMEOUT_MAX)):
            self._sync()

    def _notice_deletions(self) -> None:
        with self._write_lock:
            for stream in list(self._streams.values()):
                stream.notice_deletion()

    def _sync(self) -> None:
        """Ask for durability on duplicates of the descriptors, so that no step waits for the disk."""
        for stream in list(self._streams.values()):
            # No descriptor may be free; a full disk shows at the write, which is reported.
            with contextlib.suppress(OSError):
                descriptor = stream.file_descriptor()
                if descriptor is not None:
                    try:
                        os.fsync(descriptor)
                    finally:
                        os.close(descriptor)
