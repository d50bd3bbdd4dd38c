import threading
import time

from vllm_tts_cache.store.fence import ForgetFence


def test_a_forget_revokes_the_writes_announced_before_it_and_no_others():
    fence = ForgetFence()
    with fence.intent("a") as before, fence.intent("b") as other:
        with fence.forgetting("a"):
            pass
        with fence.intent("a") as after:
            for intent, expected in ((before, False), (other, True), (after, True)):
                with intent.writing() as is_allowed:
                    assert is_allowed is expected


def test_who_comes_during_a_forget_reads_after_it():
    fence, order = ForgetFence(), []

    def read():
        with fence.intent("a"):
            order.append("read")

    reader = threading.Thread(target=read)
    with fence.forgetting("a"):
        reader.start()
        time.sleep(0.05)
        order.append("forgotten")
    reader.join(10)
    assert order == ["forgotten", "read"]
