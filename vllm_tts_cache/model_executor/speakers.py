"""A worker's encodings: talkers build prompts from them, RPC methods manage them."""

import hmac
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from cachetools import LRUCache, TTLCache
from torch import distributed

from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import EncodeError, StorageError, TTSCacheError
from vllm_tts_cache.logs import ThrottledLog, logger
from vllm_tts_cache.model_executor.encode_queue import EncodeQueue
from vllm_tts_cache.model_executor.encode_work import (
    EncodeDevice,
    StoredEncodeWork,
    open_turns,
)
from vllm_tts_cache.speaker.reference import ReferenceEncoder, SpeakerRef, encoders_id
from vllm_tts_cache.speaker.wire import (
    Deleted,
    DescribeCall,
    Described,
    EncodingAnswer,
    EncodingCall,
    SpeakerStats,
)
from vllm_tts_cache.store.cache import open_cache
from vllm_tts_cache.store.directory import StoreDirectory, remove_tree
from vllm_tts_cache.store.encoding import Encoding, EncodingKey, encoding_to_bytes
from vllm_tts_cache.store.opening import open_store
from vllm_tts_cache.store.recovery import recover_aside

T = TypeVar("T")

throttled = ThrottledLog()

FLUSH_SECONDS = 30.0
# A process that ends does not wait for all copies; the next start goes on.
_RECOVER_PATIENCE_SECONDS = 2.0
# More audios than a worker speaks, or deletes, within a flush; the rest is noted the
# next time.
MAX_NOTED = 65_536

# The caller that asked for a removal asks again within a second or two.
_ASKED_AGAIN_SECONDS = 5.0


MAX_FAILED_PROMPTS = 4096
_MAX_CAUSE_CHARACTERS = 500
_ASLEEP = "the model is asleep; wake it up first"
_SLEEP_TIMEOUT_SECONDS = 10.0
# What the host appends to the id that the API process gave a request.
_HOSTS_SUFFIX = re.compile(r"-[0-9a-z]{8}$")


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The processes that run one model together, or the only one.

    All processes must call the same methods in the same order.

    Attributes:
        group: Their torch group for tensors on the CPU; None for a single process.
    """

    group: Any = None

    @property
    def are_several(self) -> bool:
        """Whether there is more than one."""
        return self.group is not None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which encodes for all."""
        return self.group is None or distributed.get_rank(self.group) == 0

    def all_agree(self, is_so: bool) -> bool:
        """Return whether ``is_so`` is true on every rank."""
        if self.group is None:
            return is_so
        flag = torch.tensor(int(is_so), device="cpu")
        distributed.all_reduce(flag, distributed.ReduceOp.MIN, group=self.group)
        return bool(flag.item())

    def from_rank_0(self, compute: Callable[[], T]) -> T:
        """Call ``compute`` on rank 0, and return its result, plain data, on every rank.

        Raises: On rank 0 what ``compute`` raises, on the others a `TTSCacheError` with
            its text, so that no rank waits for ever.
        """
        if self.group is None:
            return compute()
        if not self.is_first:
            result: Any = self._broadcast(None)
            if isinstance(result, TTSCacheError):
                raise result
            return result
        try:
            result = compute()
        except Exception as exc:
            self._broadcast(TTSCacheError(f"rank 0: {str(exc) or repr(exc)}"))
            raise
        self._broadcast(result)
        return result

    def _broadcast(self, value: Any) -> Any:
        values = [value]
        distributed.broadcast_object_list(
            values, group=self.group, group_src=0, device=torch.device("cpu")
        )
        return values[0]


ALONE = Ranks()


def tensor_parallel_ranks() -> Ranks:
    """Return the ranks of this worker.

    They prefill the same requests in the same order, and meet in the first layer, so a
    broadcast before it adds no waiting.
    """
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return ALONE
    group = parallel_state.get_tp_group()
    return ALONE if group.world_size == 1 else Ranks(group.cpu_group)


class Recency:
    """Collects audios that were used, and hands them on in batches.

    A voice that is hot in memory is never read from the disk, so it would be evicted
    from a full one first. Noting a use is a set's ``add``, which may happen on the
    engine's thread. The first use of a batch starts a thread that hands it on.
    """

    def __init__(
        self,
        hand_on: Callable[[Sequence[str]], None],
        *,
        flush_seconds: float = FLUSH_SECONDS,
    ):
        self._hand_on = hand_on
        self._flush_seconds = flush_seconds
        self._noted: set[str] = set()
        self._timer: threading.Timer | None = None
        self._handing_on = threading.Lock()

    def note(self, audio_sha256: str) -> None:
        """Note a use."""
        if len(self._noted) >= MAX_NOTED:
            return
        self._noted.add(audio_sha256)
        if self._timer is None:
            self._timer = threading.Timer(self._flush_seconds, self.flush)
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """Hand on what was noted."""
        if (timer := self._timer) is not None:
            timer.cancel()
        self.flush()

    def flush(self) -> None:
        """Hand on what was noted."""
        with self._handing_on:
            self._timer = None
            noted, self._noted = self._noted, set()
            used = sorted(noted)  # a copy: the engine's thread may still add to the set
            if not used:
                return
            try:
                self._hand_on(used)
            except Exception as exc:  # noqa: BLE001  whatever it is, streams go on
                message = "The use of %d speakers was not noted: %s"
                throttled.warn_of("noting uses", message, len(used), exc)


class DeletedCopies:
    """Removes this machine's copies of deleted audio, on a thread of its own.

    An RPC that listed and unlinked them would hold up every stream for as long. So it
    only looks whether there are copies, and its client repeats it until there are none.
    The encode thread is no choice: it may encode another voice for a minute.
    """

    def __init__(
        self, directory: StoreDirectory, clock: Callable[[], float] = time.monotonic
    ):
        self._directory = directory
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tts-cache-copies")
        self._lock = threading.Lock()  # never held over a file
        self._underway: set[str] = set()
        self._removed = TTLCache[str, bool](MAX_NOTED, _ASKED_AGAIN_SECONDS, clock)

    def remaining(self, audio_sha256s: Collection[str]) -> list[str]:
        """Return the audios of which there are copies; they are removed soon.

        An audio whose directory cannot be looked at is returned as well: its own
        deletion waits, and no other one.
        """
        with self._lock:
            removed = {sha for sha in audio_sha256s if self._removed.pop(sha, False)}
        # Copies that are there again are of a voice that exists: its requests write
        # them as fast as they are removed, and the caller would never be done.
        remaining = [
            sha for sha in audio_sha256s if sha not in removed and self._may_have(sha)
        ]
        with self._lock:
            begun = [sha for sha in remaining if sha not in self._underway]
            self._underway.update(begun)
        for sha in begun:
            self._pool.submit(self._remove, sha)
        return remaining

    def _may_have(self, sha: str) -> bool:
        try:
            return self._directory.has_any(sha)
        except StorageError:  # `_remove` meets it as well, and logs it
            return True

    def close(self) -> None:
        """End the thread after the audio that it is removing."""
        self._pool.shutdown(cancel_futures=True)

    def _remove(self, sha: str) -> None:
        is_removed = False
        try:
            remove_tree(self._directory.audio_directory(sha))
            is_removed = True
        except Exception as exc:  # noqa: BLE001  its future is never read
            message = "Copies of deleted audio are still on this machine's disk: %s"
            throttled.warn_of("copies of deleted audio", message, exc)
        with self._lock:
            self._underway.discard(sha)
            if is_removed:
                self._removed[sha] = True


class WorkerEncodings:
    """A worker's encodings, in memory and in files, and the thread that makes them.

    Methods for the talker and the RPC run on the engine's thread: none waits for an
    encode, takes a lock that is held over a file, or asks the catalogue.

    Args:
        encoders: By name; empty if the encode thread loads them later.
        settings: With the store's place and the memory's budget.
        device: The encoders' device.
        ranks: The processes that run the model together. They agree once for each
            prompt, so all of them ask for the same prompts in the same order.

    Attributes:
        queue: Has the encodings made that clients want.
        fingerprints: Of the encoders, by name. Rank 0 has them for all ranks.
        num_calls: How often each method of the RPC was called.
        num_prompts: Requests that got their speaker prompt, from here or from their KV.
        encode_times: Returns how long encodes took and waited since the start.

    Raises: StorageError.
    """

    def __init__(
        self,
        encoders: Mapping[str, ReferenceEncoder],
        settings: Settings,
        device: torch.device,
        *,
        ranks: Ranks = ALONE,
    ):
        store = open_store(settings, import_stock=False)  # the API process does that
        self._store = store
        self._cache = open_cache(settings, store)
        self._work = StoredEncodeWork(
            encoders=encoders,
            cache=self._cache,
            store=store,
            device=EncodeDevice(device),
            turns=open_turns(settings, store.database),
        )
        self.queue = EncodeQueue(
            self._work, max_waiting_inline=settings.max_waiting_inline
        )
        self.encode_times = self._work.times.times
        # This machine's copies may be of audio that was deleted meanwhile.
        self._recovering = (
            recover_aside(store.recover_copies) if ranks.is_first else None
        )
        self._recency = Recency(store.used)
        self._copies = None if store.copies is None else DeletedCopies(store.files)
        self.store_id = store.store_id
        self.worker_id = uuid.uuid4().hex
        self.ranks = ranks
        self.fingerprints = {name: e.fingerprint for name, e in encoders.items()}
        # Of all API servers, and of before a change: a prompt may be built again.
        self._secrets: list[bytes] = []
        self._failed_prompts = LRUCache[str, str](MAX_FAILED_PROMPTS)
        self.num_prompts = 0
        self._num_failed_prompts = 0
        self.num_calls: Counter[str] = Counter()

    # -------- for code that loads the model

    def load_encoders(
        self, load: Callable[[], Mapping[str, ReferenceEncoder]]
    ) -> dict[str, str]:
        """Have the encode thread load encoders; returns their fingerprints.

        The thread, the store, waiting jobs and encodings in memory stay as they are.

        Raises: Whatever ``load`` raises.
        """
        return self.queue.call(lambda: self._work.load(load))

    def warm_up(self, timeout_seconds: float) -> None:
        """Have the encode thread encode noise once; see `StoredEncodeWork.warm_up`.

        Raises: EncodeError, TimeoutError.
        """
        self.queue.call(self._work.warm_up, timeout_seconds)

    # -------- for the worker's sleep

    def sleep(self) -> None:
        """Encode nothing until `wake_up`: others may use the free memory meanwhile."""
        if not self.queue.pause(_ASLEEP, _SLEEP_TIMEOUT_SECONDS):
            logger.warning("The model sleeps while a reference is still encoded.")

    def wake_up(self) -> None:
        """Encode again."""
        self.queue.resume()

    # -------- for the talker

    def named_by(self, info: Mapping[str, Any]) -> SpeakerRef:
        """Return the speaker of a request, if a process with the secret named it.

        The ranks of a worker need no vote on it: vLLM gives each of them the same calls
        between the same steps, so all know the same secrets.

        Raises: TTSCacheError, ValueError.
        """
        if (ref := SpeakerRef.from_info(info)) is None:
            raise TTSCacheError("the request names no speaker")
        for secret in self._secrets:
            expected = ref.signed(secret, ref.encoders).signature
            if hmac.compare_digest(expected.encode(), ref.signature.encode()):
                return ref
        raise TTSCacheError("its speaker is not signed with this server's secret")

    def prompt(
        self, ref: SpeakerRef, encoder_names: Sequence[str]
    ) -> dict[str, Encoding]:
        """Return the encodings that a prefill needs: from memory, or one file each.

        Never waits and never encodes: the API process has to ensure what is missing.
        On a tensor-parallel worker every rank answers alike, or the rank that misses
        one would pad alone and all would speak nonsense.

        Raises: EncodeError that names what is missing.
        """
        try:
            if ref.encoders not in ("", encoders_id(self.fingerprints)):
                raise EncodeError("the model was loaded anew, with other encoders")
            found = {name: self._found(ref, name) for name in encoder_names}
        except Exception:
            self.ranks.all_agree(False)  # the other ranks wait for this one
            raise
        missing = [name for name, encoding in found.items() if encoding is None]
        all_have_it = self.ranks.all_agree(not missing)
        if missing:
            raise EncodeError(f"its {' and '.join(missing)} encoding is not stored")
        if not all_have_it:
            raise EncodeError("another rank of this worker could not read its encoding")
        self._recency.note(ref.audio_sha256)
        return {name: e for name, e in found.items() if e is not None}

    def remember_failed_prompt(self, request_id: str, cause: str) -> None:
        """Count a request that failed without its prompt, and remember why."""
        self._num_failed_prompts += 1
        self._failed_prompts[request_id] = cause[:_MAX_CAUSE_CHARACTERS]

    # -------- for the RPC

    def describe(self, call: DescribeCall, rank: int) -> Described:
        """Accept speakers that are signed with a secret; return encoders and store."""
        others = [each for each in self._secrets if each != call.secret]
        self._secrets = [call.secret, *others][:8]
        id_, place = self.store_id.id, self.store_id.place
        return Described(rank, self.fingerprints, id_, place)

    def failed(self, request_ids: Iterable[str]) -> dict[str, str]:
        """Return the cause by request id, for requests whose prompt was missing.

        Ids are those of the API process, without the suffix that the host appends.
        """
        asked = set(request_ids)
        return {
            name: cause
            for request_id, cause in list(self._failed_prompts.items())
            for name in (request_id, _HOSTS_SUFFIX.sub("", request_id))
            if name in asked
        }

    def encoding(self, call: EncodingCall, _rank: int = 0) -> EncodingAnswer:
        """Return an encoding, for an API process that cannot read it from the disk."""
        key = EncodingKey(
            audio_sha256=call.audio_sha256, encoder_fingerprint=call.fingerprint
        )
        # The segment is not known here; an inline entry evicts no registered one.
        found = self._cache.get(key, Segment.INLINE)
        return EncodingAnswer(None if found is None else encoding_to_bytes(key, found))

    def delete(self, audio_sha256s: Collection[str]) -> Deleted:
        """Delete the audios from memory, from copies on disk and from the queue.

        A running encode stores nothing when it finishes; ``busy`` names its audio,
        whose samples are still in memory. It also names audios with copies on disk,
        which another thread removes.
        """
        num_entries = sum(self._cache.memory.delete(sha) for sha in audio_sha256s)
        busy = self.queue.delete(frozenset(audio_sha256s))
        copies = self._copies
        remaining = [] if copies is None else copies.remaining(audio_sha256s)
        busy += [sha for sha in remaining if sha not in busy]
        return Deleted(num_entries=num_entries, busy=busy)

    def delete_all(self) -> Deleted:
        """Delete all audios, as `delete` does some."""
        num_entries = self._cache.memory.delete_all()
        busy = self.queue.delete(None)
        return Deleted(num_entries=num_entries, busy=busy)

    def stats(self) -> SpeakerStats:
        """Return counters and sizes; nothing is looked up on disk."""
        times = self._work.times
        return SpeakerStats(
            **self._cache.stats(),
            **self.queue.stats(),
            encodes={name: times.num_encodes[name] for name in self.fingerprints},
            failed_encodes={name: times.num_failed[name] for name in self.fingerprints},
            disk_evictions=dict(self._store.writer.evictions.snapshot()),
            bucket=self._store.bucket_counts(),
            prompts=self.num_prompts,
            failed_prompts=self._num_failed_prompts,
            rpc_calls=dict(self.num_calls),
        )

    def close(self) -> None:
        """End the threads, the encode thread after its running job, and the store."""
        self.queue.close()
        self._recency.close()
        if self._copies is not None:
            self._copies.close()
        if self._recovering is not None:
            self._recovering.join(_RECOVER_PATIENCE_SECONDS)
        self._store.close()

    # -------- how

    def _found(self, ref: SpeakerRef, encoder_name: str) -> Encoding | None:
        if (fingerprint := self.fingerprints.get(encoder_name)) is None:
            return None
        sha = ref.audio_sha256
        key = EncodingKey(audio_sha256=sha, encoder_fingerprint=fingerprint)
        return self._cache.get(key, ref.segment)
