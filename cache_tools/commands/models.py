"""`mlagen models`: the models that are known by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..output.report import count_text, json_option, print_facts, print_json
from ..tools.completion import completer, model_names

if TYPE_CHECKING:
    from mlagen.models.names import KnownModel


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME|PATH]...", shell_complete=completer(model_names))
@json_option
def models(*, names: tuple[str, ...], as_json: bool) -> None:
    """List the models that prewarm --model knows by name, or describe the given ones.

    With heads, dims and pages on one GPU, or why no kernel serves the model. Any other model is
    read from its config.json.
    """
    from mlagen.models.names import known_models

    chosen = map(_known, names) if names else known_models().values()
    found = [_document(known) for known in chosen]
    if as_json:
        print_json({"models": found})
    else:
        print_facts({document["name"]: _text(document) for document in found})
    served = sum(document["reason"] is None for document in found)
    click.echo(f"{count_text(len(found), 'model')}, {served} with kernels", err=as_json)


def _known(name: str) -> KnownModel:
    """Return the known model of a name, or one with the name of a configuration that is read."""
    from mlagen.models.config import find_model
    from mlagen.models.names import KnownModel, known_model

    if known := known_model(name):
        return known
    return KnownModel(find_model(name).name, "", (), {})


def _document(known: KnownModel) -> dict[str, Any]:
    from mlagen.errors import ArgumentError
    from mlagen.models.config import find_model
    from mlagen.models.kernels import (
        ServingOptions,
        attention_text,
        page_sizes_of,
    )

    document = {"name": known.name, "owner": known.owner, "aliases": list(known.aliases)}
    start = f"{known.name}: "
    try:
        model = find_model(known.name)
    except ArgumentError as error:
        none: dict[str, Any] = {"attention": None, "page_sizes": [], "left_out": []}
        return {**document, **none, "reason": str(error).removeprefix(start)}
    return {
        **document,
        "attention": attention_text(model),
        "page_sizes": [size for size in page_sizes_of(model, ServingOptions()) if size],
        "left_out": [sentence.removeprefix(start) for sentence in model.left_out],
        "reason": None,
    }


def _text(document: dict[str, Any]) -> str:
    also = [f"also {', '.join(document['aliases'])}"] if document["aliases"] else []
    if document["reason"] is not None:
        return "\n".join([f"no kernels: {document['reason']}", *also])
    sizes = ", ".join(map(str, document["page_sizes"]))
    pages = f"page size {sizes}" if sizes else "any page size"
    left_out = (f"without {sentence}" for sentence in document["left_out"])
    return "\n".join([f"{document['attention']}, {pages}", *left_out, *also])
