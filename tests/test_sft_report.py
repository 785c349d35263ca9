"""Records come back as they were written, and every run can be drawn."""

from PIL import Image

from vla.sft_loss import Diagnosis
from vla.sft_report import held_out_metrics, plot_curves, read_records, step_line, write_record

RECORD = {"step": 200, "loss": 3.5, "objects_loss": 0.0, "accuracy": 0.25, "xyz_bin_error": 12.0, "grad_norm": 1.0,
          "samples_per_s": 12345.0, "seconds": 90.0}  # fmt: skip
DIAGNOSIS = Diagnosis(4.0, [0.2] * 7, [3.0, 6.0, 9.0, 0, 0, 0, 0], [2.0] * 7, [2.5] * 7)


def test_records_come_back_in_order(tmp_path):
    assert read_records(tmp_path) == []
    records = [RECORD, RECORD | {"step": 400} | held_out_metrics(DIAGNOSIS)]
    for record in records:
        write_record(tmp_path, record)
    assert read_records(tmp_path) == records
    assert records[1]["held_out/xyz_bin_error"] == 6.0
    assert records[1]["held_out/entropy_gripper"] == 2.5


def test_the_line_says_what_was_measured_and_no_more():
    line = step_line(RECORD, 6000)
    assert line.startswith("step 200/6000  loss 3.500, accuracy 25.0 %, xyz off by 12.0 bins")
    assert line.endswith("12,345 samples/s, 1.5 min")
    assert "held out" not in line
    assert "objects" not in line
    assert held_out_metrics(None) == {}
    full = step_line(RECORD | {"objects_loss": 0.5} | held_out_metrics(DIAGNOSIS), 6000)
    assert "objects 0.500" in full
    assert "held out: 4.000, 20.0 %, 6.0 bins" in full


def test_curves_are_drawn_also_for_a_run_that_recorded_nothing(tmp_path):
    blank = Image.open(plot_curves(tmp_path)).convert("L").tobytes()
    for step in (200, 400):
        write_record(tmp_path, RECORD | {"step": step, "loss": 1000 / step} | held_out_metrics(DIAGNOSIS))
    assert Image.open(plot_curves(tmp_path)).convert("L").tobytes() != blank
