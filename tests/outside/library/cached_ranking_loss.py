"""Trains a SentenceTransformer with a cached ranking loss, evaluates it, and saves it on rank 0."""

import sys

from datasets import load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

folder = sys.argv[1]
model = SentenceTransformer(f"{folder}/model")
data = load_dataset("json", data_files=f"{folder}/pairs.jsonl", split="train")
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        "out",
        max_steps=4,
        per_device_train_batch_size=8,
        learning_rate=0.01,
        optim="sgd",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        report_to=[],
    ),
    train_dataset=data,
    loss=CachedMultipleNegativesRankingLoss(model, mini_batch_size=4),
    evaluator=EmbeddingSimilarityEvaluator(data["anchor"], data["positive"], [n % 5 / 4 for n in range(len(data))]),
)
trainer.train()
if trainer.is_world_process_zero():
    model.save_pretrained("final")
