# SPDX-License-Identifier: Apache-2.0
"""RecordIO: files that both libraries called pyrecordio have written, with each of their compressors."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

import edl
from edl.errors import DataError

# Chunks of at most 150 bytes: the records below in three chunks, of 6, 2 and 3 records.
WRITTEN = {
    "go-plain": """
BAMCAfvtJTsAAAAAqAAAAAYAAAAJAAAAcmVjb3JkIDAgDwAAAHJlY29yZCAxIGFiYWJhYhUAAAByZWNvcmQgMiBhYmFiYWJhYmFiYWIbAAAAcmVjb3
JkIDMgYWJhYmFiYWJhYmFiYWJhYmFiIQAAAHJlY29yZCA0IGFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYicAAAByZWNvcmQgNSBhYmFiYWJhYmFiYWJh
YmFiYWJhYmFiYWJhYmFiYWIEAwIBt/eBXgAAAABoAAAAAgAAAC0AAAByZWNvcmQgNiBhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYW
IzAAAAcmVjb3JkIDcgYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiBAMCAflyQtgAAAAAhAAAAAMAAAA5AAAAcmVjb3Jk
IDggYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiPwAAAHJlY29yZCA5IGFiYWJhYmFiYWJhYmFiYWJhYmFiYW
JhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYgAAAAA=""",
    "go-snappy": """
BAMCAXVUJs0BAAAA3wAAAAYAAAD/BgAAc05hUHBZAQgAAKWxtacJAAAAAQ0AADwrxDZyZWNvcmQgMCABCAAAHzlaxA8AAAABEwAAng6VyHJlY29yZC
AxIGFiYWJhYgEIAACg+eRlFQAAAAEZAABEHiaOcmVjb3JkIDIgYWJhYmFiYWJhYmFiAQgAAKJVzcIbAAAAABQAAEYC+xkbKHJlY29yZCAzIGFiPgIA
AQgAAOdua44hAAAAABQAALlto/khKHJlY29yZCA0IGFiVgIAAQgAAF33j3EnAAAAABQAAGOfwfInKHJlY29yZCA1IGFibgIABAMCAezX3psBAAAAUg
AAAAIAAAD/BgAAc05hUHBZAQgAAJuJRvItAAAAABQAANFCTTAtKHJlY29yZCA2IGFihgIAAQgAAOASE3EzAAAAABQAAAlIkIszKHJlY29yZCA3IGFi
ngIABAMCAc6l9qkBAAAAXgAAAAMAAAD/BgAAc05hUHBZAQgAACal4fA5AAAAABQAAMkfShg5KHJlY29yZCA4IGFitgIAAQgAAJwdPg0/AAAAABQAAN
o8pbc/KHJlY29yZCA5IGFizgIAAQgAAKZ7EToAAAAA""",
    "go-gzip": """
BAMCAS4iCHICAAAASwAAAAYAAAAfiwgAAAAAAAD/4mRgYChKTc4vSlEwUOBHcAwVEpNAUBQhZAQVgkBphIQxigQEKiKkTbBIQ6A6QpEpTkUQCAgAAP
//++0lO6gAAAAEAwIB1tJRJwIAAAAxAAAAAgAAAB+LCAAAAAAAAP/SZWBgKEpNzi9KUTBTSEwiDI0RGsyJ0gCBgAAAAP//t/eBXmgAAAAEAwIBAcrm
+QIAAAA1AAAAAwAAAB+LCAAAAAAAAP+yZGBgKEpNzi9KUbBQSEwiDdojNFuSrBkCGRgYGAABAAD///lyQtiEAAAA""",
    "python-plain": """
BAMCAQYAAADUArGPAQAAAKgAAAAJAAAAcmVjb3JkIDAgDwAAAHJlY29yZCAxIGFiYWJhYhUAAAByZWNvcmQgMiBhYmFiYWJhYmFiYWIbAAAAcmVjb3
JkIDMgYWJhYmFiYWJhYmFiYWJhYmFiIQAAAHJlY29yZCA0IGFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYicAAAByZWNvcmQgNSBhYmFiYWJhYmFiYWJh
YmFiYWJhYmFiYWJhYmFiYWIEAwIBAgAAACOSUxABAAAAaAAAAC0AAAByZWNvcmQgNiBhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYW
IzAAAAcmVjb3JkIDcgYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiBAMCAQMAAADcNcn6AQAAAIQAAAA5AAAAcmVjb3Jk
IDggYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiPwAAAHJlY29yZCA5IGFiYWJhYmFiYWJhYmFiYWJhYmFiYW
JhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYmFiYWJhYgAAAAA=""",
    "python-snappy": """
BAMCAQYAAACBMSHAAgAAAEwAAACoATQJAAAAcmVjb3JkIDAgDxkNDDEgYWIBAgAVGRMAMg0TARcIYWIbGRkAMzIZAAkfACEZHwA0Sh8ACSUAJxklAD
ViJQAUYWJhYmFiBAMCAQIAAABxW/XfAgAAACQAAABoOC0AAAByZWNvcmQgNiBhYoYCAAAzGTEAN5IxABRhYmFiYWIEAwIBAwAAABX9XUMCAAAAKQAA
AIQBODkAAAByZWNvcmQgOCBhYrYCAAA/GT0AOcI9ACRhYmFiYWIAAAAA""",
    "python-gzip": """
BAMCAQYAAABpoxp3AwAAAEcAAAAfiwgAhLsIawL/42RgYChKTc4vSlEwUOBHcAwVEpNAUBQhZAQVgkBphIQxigQEKiKkTbBIQ6A6QpEpTkUQCAD77SU7
qAAAAAQDAgECAAAAUXoHhwMAAAAsAAAAH4sIAIS7CGsC/9NlYGAoSk3OL0pRMFNITCIMjREazInSAIEAt/eBXmgAAAAEAwIBAwAAADn/wiQDAAAAMAAA
AB+LCACEuwhrAv+zZGBgKEpNzi9KUbBQSEwiDdojNFuSrBkCgSYwAAD5ckLYhAAAAA==""",
}
RECORDS = [f"record {n} {'ab' * 3 * n}".encode() for n in range(10)] + [b""]
PLAIN = base64.b64decode(WRITTEN["go-plain"])


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize("written", WRITTEN)
def test_files_of_both_libraries_are_read_from_anywhere(written: str, data: Path) -> None:
    for name in ("part-0", "part-2"):
        (data / name).write_bytes(base64.b64decode(WRITTEN[written]))
    (data / "part-1").write_bytes(b"")
    reader: Any = edl.recordio(data, raw=True)
    wanted = RECORDS * 2
    assert (len(reader), reader.records_per_read) == (22, 6)
    for start in range(23):
        for stop in range(start, 23):
            assert reader.read(start, stop).tolist() == wanted[start:stop]


def test_a_damaged_chunk_is_named(data: Path) -> None:
    path = data / "f.recordio"
    path.write_bytes(PLAIN[:-5] + b"x" + PLAIN[-4:])
    reader = edl.recordio(path, raw=True)
    assert reader.read(0, 8).tolist() == RECORDS[:8]
    words = r"f\.recordio: records 8 to 10 \(chunk 2\): the chunk is damaged: it has a wrong checksum"
    for _ in range(2):
        with pytest.raises(DataError, match=words):
            reader.read(7, 10)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (PLAIN[:-1], "the chunk of record 8, at byte 312, is torn: the file ends at byte 463"),
        (PLAIN[:320], "the chunk of record 8, at byte 312, is torn"),
        (PLAIN[:30], "the chunk of record 0, at byte 0, is torn"),
        (
            PLAIN[:188] + b"x" * 30,
            "the chunk of record 6, at byte 188, is damaged: it does not begin as a chunk",
        ),
        (PLAIN[:50] + b"x" + PLAIN[51:], "the chunk of record 0 is damaged: it has a wrong checksum"),
        (b"PAR1" * 30, "is not a RecordIO file of ElasticDL: it begins with 0x31524150"),
    ],
)
def test_a_torn_or_foreign_file_is_refused(data: Path, content: bytes, words: str) -> None:
    path = data / "f.recordio"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"f\.recordio: {words}"):
        edl.recordio(path, raw=True)
