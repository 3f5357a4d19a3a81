# SPDX-License-Identifier: Apache-2.0
"""An S3 server that authenticates and authorizes its callers like a cloud's: by signature and rights.

The test account has the rights that docs/checkpoints.md names, below one prefix. It may list more than it
needs, so that a test sees unfinished uploads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import fsspec
import httpx2

REGION, BUCKET, PREFIX = "us-east-1", "bucket", "jobs"
RIGHTS = ("GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload")


@dataclass(frozen=True)
class Account:
    """The server's address, and the credentials of an account."""

    endpoint: str
    key: str
    secret: str
    user: str

    @property
    def url(self) -> str:
        """The address below which the account may write."""
        return f"s3://{BUCKET}/{PREFIX}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which every S3 client finds the server and the credentials."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
        }

    @property
    def forged(self) -> Account:
        """The same account with a wrong secret, which the server refuses."""
        return replace(self, secret=self.secret[::-1])

    def revoke(self) -> None:
        """Delete the key, which the server refuses from now on."""
        _free_calls(self.endpoint, "inf")
        try:
            _administrator("iam", self.endpoint).delete_access_key(UserName=self.user, AccessKeyId=self.key)
        finally:
            _free_calls(self.endpoint, "0")

    def without(self, right: str) -> Account:
        """Create an account without this right, by its S3 name."""
        _free_calls(self.endpoint, "inf")
        try:
            return _account(self.endpoint, f"without-{right}", [r for r in RIGHTS if r != right])
        finally:
            _free_calls(self.endpoint, "0")


@contextmanager
def serving(host: str = "127.0.0.1") -> Iterator[Account]:
    """Run a server at this address, and yield an account; all its data is lost at the end."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address=host, port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    # Data and accounts are those of this process, and a client has the address of an earlier server.
    httpx2.post(f"{endpoint}/moto-api/reset").raise_for_status()
    fsspec.get_filesystem_class("s3").clear_instance_cache()
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
    return Account(endpoint, key["AccessKeyId"], key["SecretAccessKey"], name)


def _administrator(service: str, endpoint: str) -> Any:
    import boto3

    return boto3.client(
        service,
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id="root",
        aws_secret_access_key="root",
    )


def _free_calls(endpoint: str, number: str) -> None:
    """Set the number of further calls whose rights the server does not check."""
    httpx2.post(f"{endpoint}/moto-api/reset-auth", content=number.encode()).raise_for_status()
