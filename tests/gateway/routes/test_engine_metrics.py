"""Metrics of workers, of vLLM's kind and of our own, under the names that schedulers read."""

from __future__ import annotations

from lockstep.gateway.routes.engine_metrics import EngineSample, read_samples

VLLM = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="100"} 1.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_sum{engine="0"} 1.0
"""
OWN = """# TYPE lockstep_worker_running gauge
lockstep_worker_running{model="tiny"} 2.0
# TYPE lockstep_worker_slots gauge
lockstep_worker_slots{model="tiny"} 8.0
# TYPE lockstep_worker_slot_tokens gauge
lockstep_worker_slot_tokens{model="tiny"} 512.0
# TYPE lockstep_worker_generated_tokens counter
lockstep_worker_generated_tokens_total{model="tiny"} 90.0
"""


def test_engines_of_one_vllm_server_have_different_labels() -> None:
    assert list(read_samples(VLLM, "w")) == [
        EngineSample("num_requests_running", "w", 3.0),
        EngineSample("num_requests_running", "w/1", 4.0),
        EngineSample("num_preemptions_total", "w", 7.0),
        EngineSample(
            "cache_config_info", "w", 1.0, (("block_size", "16"), ("num_gpu_blocks", "100"))
        ),
    ]


def test_slots_of_our_own_workers_are_their_blocks() -> None:
    assert list(read_samples(OWN, "w")) == [
        EngineSample("num_requests_running", "w", 2.0),
        EngineSample("generation_tokens_total", "w", 90.0),
        EngineSample(
            "cache_config_info", "w", 1.0, (("block_size", "512"), ("num_gpu_blocks", "8"))
        ),
        EngineSample("kv_cache_usage_perc", "w", 0.25),
        EngineSample("num_preemptions_total", "w", 0.0),
    ]


def test_names_are_escaped_in_a_line() -> None:
    line = EngineSample("num_requests_waiting", 'a"b\\', 1).line()
    assert line == 'vllm:num_requests_waiting{engine="a\\"b\\\\"} 1'
