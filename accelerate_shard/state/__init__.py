"""Checkpoints of an Accelerator: ``save_state``, ``load_state``, ``save_model`` and ``get_state_dict``.

A checkpoint of ``save_state`` is a folder. Of its two forms only models and optimizers differ::

    sharded/                                  models and optimizers, which all ranks write (torch.distributed.checkpoint)
    model.safetensors, model_1.safetensors    or, with state_dict_type="full", as Accelerate writes them under DDP
    optimizer.bin, optimizer_1.bin
    scheduler.bin, sampler.bin, dl_state_dict.bin, scaler.pt, random_states_<rank>.pkl, custom_checkpoint_<number>.pkl

It is written under a hidden name beside the target and takes its place in one step, when all ranks have written everything.
"""
