"""Fine-tune the experts of a Qwen3-MoE model by LoRA, with PEFT and the Trainer of Transformers.

    python examples/lora_qwen3_moe.py [--model Qwen/Qwen3-30B-A3B] [--text FILE] [--steps 20]

Without --model the model is tiny and random, and learns this file byte by byte. Lines that use fusedmlp are marked
"ours"; with TRL's SFTTrainer, which takes the same `peft_config`, they are the same.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen3MoeConfig,
    Trainer,
    TrainingArguments,
)

from fusedmlp.integrations.peft import report  # ours
from fusedmlp.integrations.transformers import register  # ours

LENGTH = 64


def load(args: argparse.Namespace) -> PreTrainedModel:
    """The checkpoint in bfloat16, or a tiny model with random weights."""
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=2,
    )
    return AutoModelForCausalLM.from_config(config)


def examples(args: argparse.Namespace) -> list[dict[str, Tensor]]:
    """Pieces of the text; for the tiny model, of its bytes."""
    text = Path(args.text or __file__).read_bytes()
    if args.model:
        ids = AutoTokenizer.from_pretrained(args.model)(text.decode(), return_tensors="pt").input_ids[0]
    else:
        ids = torch.tensor(list(text))
    return [{"input_ids": piece, "labels": piece} for piece in ids.split(LENGTH) if len(piece) == LENGTH]


def main() -> None:
    """Train the adapters, and print how each layer computes them, and the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a Qwen3-MoE checkpoint: a folder, or a name on the Hugging Face Hub")
    parser.add_argument("--text", help="file to learn; default: this one")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    model = get_peft_model(load(args), config)
    register(model)  # ours
    for name, word in report(model).items():  # ours
        print(f"{name}: {word}")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=args.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=examples(args))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss, first step: {losses[0]:.4f}\nloss, last step: {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
