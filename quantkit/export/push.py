"""Uploads a finished, verified checkpoint to the Hugging Face hub."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.checkpoint.card_block import CardBlock, with_block
from quantkit.checkpoint.manifest import MANIFEST
from quantkit.checkpoint.reader import CARD, read_manifest
from quantkit.runtime.verify import verify
from quantkit.sources.hub import PREFIX
from quantkit.support.errors import CheckpointError, QuantkitError, UsageError
from quantkit.support.paths import typed_path

if TYPE_CHECKING:
    from huggingface_hub import HfApi

LOGIN = "hf auth login"


@dataclass(frozen=True)
class PushResult:
    """What was uploaded, or would be.

    Attributes:
        repo: the repository as ``owner/name``.
        url: the address of the commit; ``None`` for a dry run.
        private: whether only its owner sees the repository.
        files: name → bytes, the weights among them.
        left_out: files of the folder that the manifest doesn't list, and that stay here.
    """

    repo: str
    url: str | None
    private: bool
    files: dict[str, int]
    left_out: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"bytes": sum(self.files.values())}


def push(folder: str | Path, repo: str, *, private: bool = True, message: str | None = None,
         dry_run: bool = False, evaluation: CardBlock | None = None) -> PushResult:
    """Upload a checkpoint in one commit. Only files that the manifest lists go; all are read and hashed
    first.

    An evaluation is inserted into the card that is uploaded, between markers: ``quantkit verify`` takes it
    out before it hashes the card, so that what is downloaded is the checkpoint that was evaluated. The card
    on disk stays as it is.

    Args:
        folder: a checkpoint of quantkit's.
        repo: ``owner/name``; made if it isn't there.
        private: whether a repository that is made is private.
        message: the commit's message.
        dry_run: verify and say what would be uploaded, and reach no network.
        evaluation: the checkpoint's, for its card; one that the card has already is replaced.

    Raises:
        CheckpointError: ``quantkit verify`` rejects the folder.
        UsageError: no such name or path can be, the repository holds a model already, or everybody may see
            it and it shall be private.
        QuantkitError: the hub refuses or can't be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    path, name = typed_path(folder), repo.removeprefix(PREFIX)
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UsageError(f"{repo!r} can't name a repository", why=str(error).splitlines()[0],
                         next="name it owner/name") from None
    if "/" not in name:
        raise UsageError(f"{repo!r} names no owner", next=f"name it OWNER/{name}")
    report = verify(path)
    if not report.ok:
        first = report.failed[0]
        raise CheckpointError(f"{path} is not pushed: quantkit verify rejects it",
                              why=f"{first.name}: {first.detail}",
                              next=f"quantkit verify {shlex.quote(str(path))}")
    manifest = read_manifest(path)
    files = {name: (path / name).stat().st_size for name in sorted([*manifest.files, MANIFEST])}
    card = with_block((path / CARD).read_bytes(), evaluation) if evaluation is not None else None
    if card is not None:
        files[CARD] = len(card)
    left_out = tuple(sorted({p.name for p in path.iterdir()} - files.keys()))
    if dry_run:
        return PushResult(name, None, private, files, left_out)
    url, is_private = _upload(HfApi(), path, name, private, message or _message(manifest.recipe), list(files),
                              card)
    return PushResult(name, url, is_private, files, left_out)


def _message(recipe: dict[str, Any]) -> str:
    return f"quantkit checkpoint by recipe {recipe.get('name')}"


def _upload(api: HfApi, path: Path, name: str, private: bool, message: str, files: list[str],
            card: bytes | None) -> tuple[str, bool]:
    """One commit, with ``card`` instead of the card on disk; its url, and whether the repository is private.
    Raises QuantkitError."""
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        api.create_repo(name, private=private, exist_ok=True)
        remote_files = api.list_repo_files(name)
        if any(name.endswith(".safetensors") for name in remote_files):
            raise UsageError(f"{name} holds a model already",
                             why="its old files would stay among the new ones",
                             next="choose another name, or delete that repository's files first")
        is_private = bool(api.repo_info(name).private)
        if private and not is_private:
            raise UsageError(f"{name} was there before, and everybody may see it", why="nothing was uploaded",
                             next="say --public, make the repository private, or choose another name")
        operations = [CommitOperationAdd(file, card if file == CARD and card is not None else path / file)
                      for file in files]
        done = api.create_commit(name, operations, commit_message=message)
        return str(done.commit_url), is_private
    except QuantkitError:
        raise
    except LocalTokenNotFoundError as error:
        raise QuantkitError("you are not logged in to the hub", why=_first_line(error), next=LOGIN) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        denied = status in (401, 403)
        again = f"quantkit push {shlex.quote(str(path))} {name} (what is uploaded is kept)"
        raise QuantkitError(f"the hub refuses {name}" if denied else f"the upload to {name} failed",
                            why=_first_line(error),
                            next=f"{LOGIN}, with a token that may write to {name.split('/')[0]}" if denied
                            else again) from error
    except Exception as error:  # whichever HTTP library the hub's client uses raises what it likes
        raise QuantkitError(f"the hub can't be reached to upload {name}", why=_first_line(error),
                            next="check the connection, then run the same command again") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
