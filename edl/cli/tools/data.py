# SPDX-License-Identifier: Apache-2.0
"""`edl data`: what is in files of data, and files that are made of other data."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from edl.cli.shared import groups
from edl.cli.shared.display import Screen
from edl.cli.shared.output import TextForm, TextOption
from edl.config.helm_set import parse_set
from edl.contract.own_modules import module_command
from edl.contract.workers import worker_environment
from edl.formatting import class_numbers, how_many, plain

if TYPE_CHECKING:
    from edl.data.description import Description

app = groups.group("data", "Describe files of data, and convert data to files.")


class Elements(StrEnum):
    """What an element of a stream is."""

    records = "records"
    batches = "batches"


@app.command()
def inspect(
    address: Annotated[
        str, typer.Argument(help="A file, a directory, a pattern, or an address such as s3://bucket/data.")
    ],
    format: Annotated[
        str, typer.Option("--format", help="The format, as in data.format; default: by the files' names.")
    ] = "",
    options: Annotated[
        list[str],
        typer.Option(
            "--option", help="An option of the format, as in data.options; repeatable: --option delimiter=;"
        ),
    ] = [],  # noqa: B006
    form: TextOption = TextForm.text,
) -> None:
    """Describe files of data: format, records, columns, first records.

    Opens them as a job would, and builds the index where the format needs one.
    """
    from edl.data.description import describe  # imported late, because pyarrow is slow to import

    given: dict[str, Any] = {}
    for option in options:
        parse_set(option, given)
    found = describe(address, format or None, given)
    if form is TextForm.json:
        print(json.dumps(asdict(found)))
        return
    console = Screen()
    for line in _lines(found):
        console.print(line, soft_wrap=True)


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(help="A Python file with data(split) or data(), or files as for `edl data inspect`."),
    ],
    target: Annotated[str, typer.Argument(help="The file to write, such as train.array_record.")],
    split: Annotated[str, typer.Option(help="The split that data() is asked for.")] = "train",
    elements: Annotated[
        Elements | None,
        typer.Option(
            help="What each element of a stream is; default: batches of tf.data, records of others."
        ),
    ] = None,
    format: Annotated[str, typer.Option("--format", help="The format of the source's files.")] = "",
    options: Annotated[
        list[str], typer.Option("--option", help="An option of that format; repeatable.")
    ] = [],  # noqa: B006
    force: Annotated[bool, typer.Option("--force", help="Replace the target if it exists.")] = False,
) -> None:
    """Write records of any source to one ArrayRecord file, once.

    For data that cannot be read by index: a tf.data pipeline, a generator, an IterableDataset.
    edl.arrayrecord returns the records as the source gave them. The file appears when it is complete.
    """
    given: dict[str, Any] = {}
    for option in options:
        parse_set(option, given)
    request = {
        "source": source,
        "target": target,
        "split": split,
        "elements": elements or "",
        "format": format,
        "options": given,
        "replace": force,
    }
    environment = {**os.environ, **worker_environment(os.environ)}
    environment |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        module_command("edl.trainer.programs.convert_data"),
        input=json.dumps(request).encode(),
        env=environment,
    )
    raise typer.Exit(done.returncode if done.returncode >= 0 else 1)


def _lines(found: Description) -> Iterator[Text]:
    where = f"{found.format}, {how_many(found.records, 'record')} in {how_many(found.files, 'file')}"
    yield Text.assemble((plain(found.address), "bold"), f"  {where}, {_size(found.bytes)}")
    access = "yes" if found.single_records else "no, blocks of records are read and mixed"
    yield Text(f"single records can be read: {access}")
    built = f", built in {found.index_seconds:.1f} s" if found.index_seconds else ""
    index = f" with an index beside it ({_size(found.index_bytes)}{built})" if found.index_bytes else ""
    yield Text(f"opened in {found.open_seconds:.2f} s{index}")
    if found.matrix:
        yield Text(f"columns of the features: {plain(', '.join(found.matrix))}")
    if found.classes:
        yield Text(f"labels: {plain(class_numbers(found.classes))}")
    if not found.columns:
        return
    yield Text("")
    head = ("column", "type", "shape", *(f"record {n}" for n in range(len(found.columns[0].first))))
    rows = [(c.name, c.dtype, _shape(c.shape), *c.first) for c in found.columns]
    cells = [tuple(map(plain, row)) for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for number, row in enumerate(cells):
        line = "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        yield Text(line, "" if number else "dim")


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _size(size: int) -> str:
    for unit, bytes in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= bytes:
            return f"{size / bytes:,.1f} {unit}"
    return how_many(size, "byte")
