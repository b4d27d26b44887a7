from launch import gpu_variables as gpu


def test_a_variable_of_the_job_takes_precedence():
    assert gpu.job_variables({"NCCL_DEBUG": "INFO"}) == {"NCCL_DEBUG": "INFO"}
    assert gpu.job_variables({"A": "1"}) == {"NCCL_DEBUG": "WARN", "A": "1"}
