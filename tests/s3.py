"""A server that speaks S3 and looks at who asks, as a cloud's does: at a call's signature and at its rights.

The account it gives has the rights that docs/checkpoints.md names, below one prefix. It may list more than
it needs, so that a test sees what was left half done.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx2

REGION, BUCKET, PREFIX = "us-east-1", "bucket", "jobs"
RIGHTS = ("GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload")


@dataclass(frozen=True)
class Account:
    """Where the server is, and who may use it."""

    endpoint: str
    key: str
    secret: str

    @property
    def url(self) -> str:
        """The address below which it may write."""
        return f"s3://{BUCKET}/{PREFIX}"

    @property
    def variables(self) -> dict[str, str]:
        """Those of the environment by which every client of S3 finds it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
        }

    @property
    def forged(self) -> Account:
        """The same name, and another secret: it is refused."""
        return replace(self, secret=self.secret[::-1])

    def without(self, right: str) -> Account:
        """One that has not this right, of S3's names for them."""
        _free_calls(self.endpoint, "inf")
        try:
            return _account(self.endpoint, f"without-{right}", [r for r in RIGHTS if r != right])
        finally:
            _free_calls(self.endpoint, "0")


@contextmanager
def serving(host: str = "127.0.0.1") -> Iterator[Account]:
    """An account of a server at that address of this machine, which goes with all that it has been given."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address=host, port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    try:
        _administrator("s3", endpoint).create_bucket(Bucket=BUCKET)
        account = _account(endpoint, "job", RIGHTS)
        _free_calls(endpoint, "0")
        yield account
    finally:
        _free_calls(endpoint, "inf")  # of this process, for the next server
        server.stop()


def _account(endpoint: str, name: str, rights: Iterable[str]) -> Account:
    iam = _administrator("iam", endpoint)
    lists = {"Effect": "Allow", "Action": "s3:ListBucket*", "Resource": "arn:aws:s3:::*"}
    objects = f"arn:aws:s3:::{BUCKET}/{PREFIX}/*"
    does = {"Effect": "Allow", "Action": [f"s3:{right}" for right in rights], "Resource": objects}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [lists, does]})
    iam.create_user(UserName=name)
    iam.put_user_policy(UserName=name, PolicyName="checkpoints", PolicyDocument=policy)
    key = iam.create_access_key(UserName=name)["AccessKey"]
    return Account(endpoint, key["AccessKeyId"], key["SecretAccessKey"])


def _administrator(service: str, endpoint: str) -> Any:
    import boto3

    return boto3.client(
        service, endpoint_url=endpoint, region_name=REGION,
        aws_access_key_id="root", aws_secret_access_key="root",
    )  # fmt: skip


def _free_calls(endpoint: str, number: str) -> None:
    """How many calls, from now on, nobody's rights are looked at for."""
    httpx2.post(f"{endpoint}/moto-api/reset-auth", content=number.encode()).raise_for_status()
