from launch import gpu_variables as gpu


def test_a_variable_of_the_job_takes_precedence():
    assert gpu.job_variables({"NCCL_DEBUG": "INFO"}) == {"NCCL_DEBUG": "INFO"}
    assert gpu.job_variables({"A": "1"}) == {"NCCL_DEBUG": "WARN", "A": "1"}


def test_nodes_of_a_rack_count_as_one_domain():
    assert gpu.gpu_target("h100", 8, 4) == "h100-8x4"
    assert gpu.gpu_target("gb200", 4, 16) == "gb200-64x1"
    assert gpu.gpu_target("gb300", 4, 36) == "gb300-72x2"
