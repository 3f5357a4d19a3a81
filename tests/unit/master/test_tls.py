# SPDX-License-Identifier: Apache-2.0
"""A certificate is valid for edl's own checks exactly if it is for gRPC and kubectl."""

import ssl
from pathlib import Path

from edl.net import tls
from tests.support.kubernetes.certificates import Authority


def test_an_authority_of_openssl_req_is_accepted(tmp_path: Path) -> None:
    secret = Authority.new(tmp_path / "authority").issue(tmp_path / "tls", "localhost")
    told: list[str] = []
    certificate = tls.Certificate(secret, "localhost", told.append)
    certificate.credentials()
    certificate.look()
    assert told == []
    # Python 3.13 refuses it by this flag alone; older versions do not set it.
    strict = tls.client_context(secret / tls.CA)
    assert not strict.verify_flags & ssl.VERIFY_X509_STRICT
    assert strict.check_hostname and strict.verify_mode is ssl.CERT_REQUIRED


def test_a_certificate_of_a_different_authority_or_host_is_still_reported(tmp_path: Path) -> None:
    authority = Authority.new(tmp_path / "authority")
    secret = authority.issue(tmp_path / "tls", "elsewhere")
    told: list[str] = []
    certificate = tls.Certificate(secret, "localhost", told.append)
    certificate.credentials()
    certificate.look()
    assert len(told) == 1 and "Hostname mismatch" in told[0]
    (secret / tls.CA).write_bytes((Authority.new(tmp_path / "other").folder / tls.CA).read_bytes())
    certificate.look()
    assert len(told) == 2 and "unable to get local issuer certificate" in told[1]
