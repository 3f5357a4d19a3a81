"""TLS between a job's master and its parameter servers, and those who call them: workers, commands, readers.

Who listens has a folder as cert-manager's Secrets are mounted (tls.crt, tls.key, ca.crt); who calls needs
ca.crt alone. Who has neither speaks without TLS. The token says who may call, in either case.

Promise: a certificate that is replaced while the master runs is used for the next connection; one that
cannot be used is told, and the last one stays in use. gRPC only says that a master does not answer: when that
is because of TLS, `trouble` says what is wrong.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from edl.errors import EdlError

FOLDER = "EDL_TLS_DIRECTORY"  # in the environment of the master and of parameter servers
AUTHORITY = "EDL_TLS_CA"  # in that of workers, commands and readers: the file ca.crt
CERTIFICATE, KEY, CA = "tls.crt", "tls.key", "ca.crt"
TRIAL_SECONDS = 3.0
MOST_ROUNDS = 10  # of a handshake
# Of every channel. Whom a job's processes call is on this machine or in this cluster: no proxy of the
# environment is the way there. Whoever comes back may be at another address: resolve the name anew, and don't
# wait long to try. By default an attempt may last 20 s: one to the address of a pod that has just gone then
# hangs so long, though its successor listens.
CALLS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # for one attempt: a machine that is busy may need long for it
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


def authority() -> str:
    """The file of those who vouch for the master, as the environment says; empty: no TLS."""
    folder = os.environ.get(FOLDER, "")
    return os.environ.get(AUTHORITY, "") or (str(Path(folder).absolute() / CA) if folder else "")


def channel(address: str, ca: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
    """A connection to a master or a parameter server.

    Args:
        ca: what `authority` says.
        options: beside those of every channel.

    Raises:
        EdlError: that file cannot be read.
    """
    options = [*CALLS, *options]
    if not ca:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, _credentials(ca), options=options)


def aio_channel(address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
    """The same for asyncio, by the environment's `authority`. Raises: EdlError."""
    options = [*CALLS, *options]
    if not (ca := authority()):
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, _credentials(ca), options=options)


def _credentials(ca: str) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(_bytes(Path(ca)))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EdlError(f"TLS: {path}: cannot read: {error.strerror}") from error


def trouble(address: str, ca: str) -> str:
    """Why a caller and the master do not understand each other, found out by a connection without gRPC.

    Empty if it is not because of TLS, or nobody listens.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        return f"TLS: {ca} does not hold the certificates of who vouches for the master: {error}"
    if not ca:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host, int(port)), TRIAL_SECONDS) as connection:
            try:
                context.wrap_socket(connection, server_hostname=host).close()
            except ssl.SSLCertVerificationError as error:
                return f"its certificate is not accepted: {error.verify_message} (verified with {ca})"
            except OSError:  # an answer that is not TLS, or none
                return f"it does not speak TLS, and {AUTHORITY} is set here: {ca}" if ca else ""
    except OSError:
        return ""
    return "" if ca else f"it speaks TLS: set {AUTHORITY} to the file of who vouches for it (its ca.crt)"


def certificate_for(host: str, tell: Callable[[str], object]) -> Certificate | None:
    """That of who listens, if the environment names one.

    Args:
        host: by which it is reached.
        tell: takes what is wrong with it, on any thread.
    """
    folder = os.environ.get(FOLDER)
    return Certificate(Path(folder), host.strip("[]"), tell) if folder else None


class Certificate:
    """The own one of who listens.

    Args:
        folder: with tls.crt, tls.key and ca.crt.
        name: host by which callers reach the master.
        tell: takes what is wrong with the certificate, and "" when nothing is any more.
    """

    def __init__(self, folder: Path, name: str, tell: Callable[[str], object]):
        self._folder, self._name, self._tell = folder, name, tell
        self._pair = (b"", b"")
        self._next: grpc.ServerCertificateConfiguration | None = None
        self._told = ""

    def credentials(self) -> grpc.ServerCredentials:
        """For a server, for as long as it runs.

        Raises:
            EdlError: the files cannot be read, or are not a certificate and its key.
        """
        self._pair = self._read(self._place())
        first = _configuration(self._pair)
        return grpc.dynamic_ssl_server_credentials(first, self._fresh, False)  # type: ignore[arg-type]

    def look(self) -> None:
        """See whether it was replaced, and whether callers will accept it."""
        why = ""
        place = self._place()
        try:
            if (pair := self._read(place)) != self._pair:
                self._pair, self._next = pair, _configuration(pair)
            if refused := _refusal(place, self._name):
                why = f"callers at {self._name} will not accept {place / CERTIFICATE}: {refused}"
        except EdlError as error:
            why = f"{error}; the last certificate stays in use"
        if why != self._told:
            self._told = why
            self._tell(why)

    def _fresh(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before each handshake; None: as before."""
        found, self._next = self._next, None
        return found

    def _place(self) -> Path:
        """Where the files are now. The kubelet replaces the folder that they are links into, so all three are
        of one moment there."""
        return (self._folder / CERTIFICATE).resolve().parent

    def _read(self, place: Path) -> tuple[bytes, bytes]:
        """Key and certificate."""
        pair = _bytes(place / KEY), _bytes(place / CERTIFICATE)
        _server_context(place)
        return pair


def _configuration(pair: tuple[bytes, bytes]) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([pair])


def _server_context(place: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(place / CERTIFICATE, place / KEY, password=lambda: b"")
    except (OSError, ValueError) as error:  # also ssl.SSLError
        said = getattr(error, "reason", None) or str(error)
        raise EdlError(
            f"TLS: {place}: {CERTIFICATE} and {KEY} are not a certificate and its key, unencrypted: {said}"
        ) from error
    return context


def _refusal(place: Path, name: str) -> str:
    """Why callers that trust the ca.crt beside it will not accept the certificate for a host of that name;
    empty if they will. Two ends shake hands in memory."""
    try:
        client = ssl.create_default_context(cafile=str(place / CA))
    except OSError as error:
        return f"{CA} does not hold the certificates of who vouches for it: {error}"
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(to_client, to_server, server_hostname=name)
    master = _server_context(place).wrap_bio(to_server, to_client, server_side=True)
    for _ in range(MOST_ROUNDS):
        for end in (caller, master):
            try:
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
            except ssl.SSLError as error:
                return str(error)
    return ""
