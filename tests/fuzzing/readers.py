"""Everything of this program that reads files which users bring along.

A reader goes on until the files would be in use: what is only found out by the first decision, optimizer step or table
is found out here, too. Configurations of accelerate are read by accelerate alone.
"""

from tests.fuzzing import env_readers as env
from tests.fuzzing import model_readers as model
from tests.fuzzing import run_readers as run
from tests.fuzzing.harness import Reader

READERS = (
    Reader("config.json", model.model_config, share=40),
    Reader("preprocessor_config.json", model.preprocessor),
    Reader("dataset_statistics.json", model.statistics),
    Reader("safetensors and index", model.weights, share=250),
    Reader("action head, proprio projector", model.heads, share=150, hostile=model.hostile_heads),
    Reader("tokenizer.json", model.tokenizer_json, share=30, hostile=model.hostile_tokenizers),
    Reader("tokenizer.model", model.tokenizer_model, share=10),
    Reader("adapter folder", model.adapter, share=20, intact=model.ADAPTER_COPIES),
    Reader("trainer state", run.trainer_state, share=30),
    Reader("run folder to resume", run.run_to_resume, share=10),
    Reader("run folder in rl.report", run.stored_run, share=150),
    Reader("report and comparison pages", run.report, share=1),
    Reader("results.json", run.results, share=250),
    Reader("BDDL file", env.bddl, share=250),
    Reader("initial states", env.init_states, share=250),
    Reader("demonstrations", env.demonstrations, share=200),
    Reader("journal of demonstrations", env.demo_journal, share=150),
    Reader("sample_observations.npz", env.observations, share=150),
    Reader("teacher_probe.npz", run.teacher_probe, share=150),
    Reader("asset folder", env.asset_folder, share=50),
    Reader("sft_run.json", model.model_card, share=150),
    Reader("whole checkpoint", model.checkpoint, share=5),
    Reader("merge of an adapter", model.merging, share=1, intact=model.ADAPTER_COPIES),
)
