"""Trains a SetFit model, whose body is a SentenceTransformer, with checkpoints, and saves it on rank 0.

On all ranks at once, one would delete the ``config.json`` that another has just written, under DDP as well.
"""

import sys

from accelerate import PartialState
from datasets import load_dataset
from setfit import SetFitModel, Trainer, TrainingArguments

folder = sys.argv[1]
data = load_dataset("json", data_files=f"{folder}/labels.jsonl", split="train")
model = SetFitModel.from_pretrained(f"{folder}/model")
trainer = Trainer(
    model=model,
    args=TrainingArguments("out", batch_size=4, num_epochs=1, max_steps=4, save_steps=2, report_to="none"),
    train_dataset=data,
    eval_dataset=data,
)
trainer.train()
print(trainer.evaluate())
if PartialState().is_main_process:
    model.save_pretrained("final")
