# SPDX-License-Identifier: Apache-2.0
"""TLS of a job's master and parameter servers and of their clients: workers, commands, readers.

A server needs a folder in the layout of cert-manager's Secrets (tls.crt, tls.key, ca.crt); a client needs
ca.crt only. Without these files, connections do not use TLS. In either case, the token authorizes calls.

Promise: a certificate that is replaced while the master runs is used for the next connection. An invalid one
is reported, and the last valid one stays in use. gRPC only reports that a master does not answer; if TLS is
the cause, `trouble` describes the problem.
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
AUTHORITY = "EDL_TLS_CA"  # in the environment of workers, commands and readers: the file ca.crt
CERTIFICATE, KEY, CA = "tls.crt", "tls.key", "ca.crt"
TRIAL_SECONDS = 3.0
MAX_ROUNDS = 10  # greatest number of rounds of a handshake
# Options of every channel. Servers are on this machine or in this cluster, so proxies from the environment
# are ignored. A restarted server may have a different address, so names are resolved anew and retries are
# frequent. By default, a connection attempt may last 20 s: an attempt to the address of a deleted pod would
# hang that long although its successor listens.
CALLS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # time for one attempt, which can be slow on a busy machine
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


def authority() -> str:
    """Path of the CA certificate file for the master, from the environment; empty: no TLS."""
    folder = os.environ.get(FOLDER, "")
    return os.environ.get(AUTHORITY, "") or (str(Path(folder).absolute() / CA) if folder else "")


def channel(address: str, ca: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
    """Open a channel to a master or a parameter server.

    Args:
        ca: result of `authority`.
        options: additional options of this channel.

    Raises:
        EdlError: the file `ca` cannot be read.
    """
    options = [*CALLS, *options]
    if not ca:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, _credentials(ca), options=options)


def aio_channel(address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
    """Like `channel`, but for asyncio, and with the `authority` of the environment.

    Raises:
        EdlError: the CA certificate file cannot be read.
    """
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


def client_context(ca: str | Path | None) -> ssl.SSLContext:
    """Create the context of a client that trusts the authority in the file `ca`; None: those of the machine.

    It accepts what gRPC (BoringSSL) and kubectl accept. From 3.13 on, Python also refuses certificates that
    lack an extension of RFC 5280: those of `openssl req -x509`, and of some clusters. The signature, the
    dates and the host name are verified all the same.

    Raises:
        OSError: the file cannot be read, or holds no certificates.
    """
    context = ssl.create_default_context(cafile=str(ca) if ca else None)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def trouble(address: str, ca: str) -> str:
    """Diagnose why TLS between a client and the master fails, with a connection without gRPC.

    Empty if TLS is not the cause, or if no server listens.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        context = client_context(ca)
    except OSError as error:
        return f"TLS: {ca} does not hold certificates of an authority: {error}"
    if not ca:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host, int(port)), TRIAL_SECONDS) as connection:
            try:
                context.wrap_socket(connection, server_hostname=host).close()
            except ssl.SSLCertVerificationError as error:
                return f"its certificate is not accepted: {error.verify_message} (verified with {ca})"
            except OSError:  # the answer is not TLS, or missing
                return f"it does not speak TLS, and {AUTHORITY} is set here: {ca}" if ca else ""
    except OSError:
        return ""
    return "" if ca else f"it speaks TLS: set {AUTHORITY} to the file of its authority (its ca.crt)"


def certificate_for(host: str, tell: Callable[[str], object]) -> Certificate | None:
    """The certificate of a server, if the environment names one.

    Args:
        host: host name by which clients reach the server.
        tell: is called, on any thread, with a description of what is wrong with the certificate.
    """
    folder = os.environ.get(FOLDER)
    return Certificate(Path(folder), host.strip("[]"), tell) if folder else None


class Certificate:
    """A server's own certificate.

    Args:
        folder: the folder with tls.crt, tls.key and ca.crt.
        name: host name by which clients reach the server.
        tell: is called with a description of what is wrong with the certificate; with "" once it is valid.
    """

    def __init__(self, folder: Path, name: str, tell: Callable[[str], object]):
        self._folder, self._name, self._tell = folder, name, tell
        self._pair = (b"", b"")
        self._next: grpc.ServerCertificateConfiguration | None = None
        self._told = ""

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials of a gRPC server, which follow changes of the certificate.

        Raises:
            EdlError: the files cannot be read, or are not a certificate and its key.
        """
        self._pair = self._read(self._place())
        first = _configuration(self._pair)
        return grpc.dynamic_ssl_server_credentials(first, self._fresh, False)  # type: ignore[arg-type]

    def look(self) -> None:
        """Check whether the certificate was replaced, and whether clients will accept it."""
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
        """Callback of gRPC before each handshake; None: the certificate has not changed."""
        found, self._next = self._next, None
        return found

    def _place(self) -> Path:
        """The current real folder of the files.

        The files are links into a folder that the kubelet replaces as a whole, so the three files in it are
        consistent.
        """
        return (self._folder / CERTIFICATE).resolve().parent

    def _read(self, place: Path) -> tuple[bytes, bytes]:
        """Read and check the key and the certificate."""
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
    """Why clients that trust the ca.crt beside it will reject the certificate for this host name.

    Empty if they will accept it. This performs a TLS handshake in memory.
    """
    try:
        client = client_context(place / CA)
    except OSError as error:
        return f"{CA} does not hold certificates of an authority: {error}"
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(to_client, to_server, server_hostname=name)
    master = _server_context(place).wrap_bio(to_server, to_client, server_side=True)
    for _ in range(MAX_ROUNDS):
        for end in (caller, master):
            try:
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
            except ssl.SSLError as error:
                return str(error)
    return ""
