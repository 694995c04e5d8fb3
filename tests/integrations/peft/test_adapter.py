"""Adapters by themselves: published, and saved for engines and peft."""

from __future__ import annotations

import functools
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import dbuffer
from dbuffer.integrations import peft as integration
from dbuffer.integrations.peft.saved import hold
from dbuffer.store import filesystem
from dbuffer.testing.waiting import TIMEOUT_S
from tests.support.engines.tiny_models import make_model
from tests.support.peft_parts import (
    NEEDS_PEFT,
    bits,
    everything_in,
    lora,
    make,
    reference,
    train,
)

pytestmark = NEEDS_PEFT


def model_of(seed: int, **more: Any) -> Any:
    """The same base model with an adapter of its own; only that is what the seed decides."""
    model = make("qwen3", lora(**more))
    train(model, seed)
    return model


def files_of_peft(model: Any, directory: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """What peft itself saves."""
    from safetensors.torch import load_file

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(directory, save_embedding_layers=False)
    return (
        bits(load_file(directory / "adapter_model.safetensors")),
        json.loads((directory / "adapter_config.json").read_text()),
    )


class TestSending:
    @pytest.mark.parametrize(
        "more",
        [
            {},
            {"use_dora": True},
            {"modules_to_save": ["lm_head"]},
            {"trainable_token_indices": [3]},
        ],
        ids=str,
    )
    def test_tensors_and_configuration_are_those_that_peft_saves(
        self, sender, receiver, tmp_path, more
    ):
        model = model_of(1, **more)
        before = everything_in(model)
        publication = integration.send_adapter(sender, model, metadata={"step": 7})
        assert everything_in(model) == before
        tensors, config = files_of_peft(model, tmp_path)
        with receiver.open() as snapshot:
            assert snapshot.version == publication.version
            assert bits(snapshot.tensors) == tensors
            assert snapshot.metadata["step"] == 7
            found = snapshot.metadata["adapter_config"]
        # Where there is no task type peft notes the class of the base model, for its AutoPeftModel.
        found["auto_mapping"] = config["auto_mapping"]
        sets = {"target_modules", "modules_to_save"}
        assert found.keys() == config.keys()
        for key in found.keys() - sets:
            assert found[key] == config[key], key
        for key in sets:
            assert found[key] == (config[key] and sorted(config[key])), key
        assert (found["r"], found["lora_alpha"]) == (4, 16)

    def test_one_of_several(self, sender, receiver):
        model = model_of(1)
        model.add_adapter("other", lora(r=2))
        integration.send_adapter(sender, model, adapter="other")
        with receiver.open() as snapshot:
            assert snapshot.metadata["adapter_config"]["r"] == 2
            assert {min(spec.shape) for spec in snapshot.specs} == {2}
            assert not [name for name in snapshot.tensors if "other" in name]

    @pytest.mark.parametrize(
        ("make_it", "match"),
        [
            (lambda: (torch.nn.Linear(2, 2), "default"), "a Linear has no adapter 'default'"),
            (lambda: (model_of(1), "other"), "has no adapter 'other'; it has 'default'"),
            (lambda: (model_of(1, init_lora_weights="pissa"), "default"), "merged_weights"),
        ],
    )
    def test_refused(self, sender, make_it, match):
        model, adapter = make_it()
        with pytest.raises(dbuffer.InvalidWeightsError, match=match):
            integration.send_adapter(sender, model, adapter=adapter)

    def test_only_initializations_that_change_the_base_model_are_refused(self, sender):
        from peft import LoraGAConfig, get_peft_model
        from peft.tuners.lora import LoraLayer, corda, preprocess_loraga
        from peft.tuners.lora import config as configs

        more = {"lora_ga": LoraGAConfig(), "corda": configs.CordaConfig()}
        # The adapter is computed from the base model's weights by these methods of peft.
        of_layer = {name[:-5] for name in vars(LoraLayer) if name.endswith("_init")}
        assert {*more, "loftq"} < of_layer
        for init in of_layer - {"loftq"}:  # needs SciPy
            base = torch.nn.Sequential(torch.nn.Linear(8, 8))
            x = torch.randn(16, 8, requires_grad=True)
            before = base[0].weight.detach().clone()
            options = {f"{init}_config": more[init]} if init in more else {}
            config = lora(r=2, target_modules=["0"], init_lora_weights=init, **options)
            if init == "corda":
                corda.preprocess_corda(base, config, functools.partial(base, x))
            if init == "lora_ga":
                preprocess_loraga(
                    base, config, lambda of=base, x=x: of(x).square().mean().backward()
                )
            model = get_peft_model(base, config)
            if torch.equal(model.base_model.model[0].base_layer.weight, before):
                integration.send_adapter(sender, model)
            else:
                with pytest.raises(dbuffer.InvalidWeightsError, match="has changed the base"):
                    integration.send_adapter(sender, model)

    def test_metadata_of_that_name_is_refused(self, sender):
        with pytest.raises(dbuffer.InvalidWeightsError, match="adapter_config"):
            integration.send_adapter(sender, model_of(1), metadata={"adapter_config": {}})


class TestNeitherForTheOther:
    @pytest.mark.parametrize("partial", [False, True])
    def test_who_expects_a_model_refuses_an_adapter(self, sender, receiver, partial):
        model, seen = make_model("qwen3", 0), []
        before = bits(dict(model.state_dict()))
        integration.send_adapter(sender, model_of(1))
        for target in (model, dict(model.state_dict()), lambda pairs: seen.append(pairs)):
            with pytest.raises(dbuffer.WeightsMismatchError, match="adapter"):
                receiver.load_into(target, partial=partial)
        assert bits(dict(model.state_dict())) == before
        assert not seen

    def test_who_expects_an_adapter_refuses_a_model(self, sender, receiver, tmp_path):
        sender.send(integration.merged_weights(model_of(1)))
        with pytest.raises(dbuffer.WeightsMismatchError, match="adapter"):
            integration.save_adapter(receiver, tmp_path / "saved")
        assert list((tmp_path / "saved").iterdir()) == []


class TestSaving:
    def test_peft_reads_it(self, sender, receiver, tmp_path):
        """Each version has a directory, and two stay; one that is there is not written again.

        What a process that was killed had begun goes, and not what another one writes.
        """
        killed, begun = tmp_path / ".saving-killed", tmp_path / ".saving-begun"
        for path in (killed, begun):
            path.mkdir()
        os.utime(killed, (0, 0))
        from peft import PeftModel

        with pytest.raises(dbuffer.WaitTimeoutError):
            integration.save_adapter(receiver, tmp_path, timeout_s=0.01)
        model, saved = model_of(1), []
        for step in range(4):
            train(model, step)
            integration.send_adapter(sender, model)
            saved.append(integration.save_adapter(receiver, tmp_path))
            sender.wait_applied(step + 1, timeout_s=TIMEOUT_S)
        assert [one.version for one in saved] == [1, 2, 3, 4]
        assert len({one.path for one in saved} | {one.number for one in saved}) == 8
        assert sorted(tmp_path.iterdir()) == sorted([begun, *(one.path for one in saved[-2:])])
        found = PeftModel.from_pretrained(make_model("qwen3", 0), saved[-1].path)
        assert bits(reference(found)) == bits(reference(model))
        files = {path: path.stat().st_ino for path in saved[-1].path.iterdir()}
        assert integration.save_adapter(receiver, tmp_path) == saved[-1]
        assert {path: path.stat().st_ino for path in saved[-1].path.iterdir()} == files

    def test_files_that_a_request_names_stay(self, sender, receiver, tmp_path):
        model, saved = model_of(1), []

        def save() -> None:
            integration.send_adapter(sender, model)
            saved.append(integration.save_adapter(receiver, tmp_path))

        save()
        held = hold(saved[0].path)
        assert hold(saved[0].path) is held
        for _ in range(3):
            save()
        paths = [one.path for one in saved]
        assert [path.is_dir() for path in paths] == [True, False, True, True]
        assert hold(paths[1]) is None
        held.close()
        save()
        assert [path.is_dir() for path in paths] == [False, False, False, True]

    def test_what_has_its_name_outlives_a_power_cut(self, sender, receiver, tmp_path, monkeypatch):
        flushed, sync_file = [], filesystem.sync_file
        monkeypatch.setattr(
            filesystem,
            "sync_file",
            lambda number, path: (flushed.append(path.name), sync_file(number, path)),
        )
        integration.send_adapter(sender, model_of(1))
        saved = integration.save_adapter(receiver, tmp_path)
        assert sorted(flushed) == sorted(path.name for path in saved.path.iterdir())

    def test_a_store_that_took_the_place_of_another(self, store, tmp_path, receiver):
        """Version 1 of the new store is not taken for version 1 of the old one, nor for older."""
        import shutil

        from peft import PeftModel

        found = []
        for seed in (1, 2):
            with dbuffer.WeightSender(store) as sender:
                for _ in range(3 if seed == 1 else 1):
                    integration.send_adapter(sender, model_of(seed))
                    with dbuffer.WeightReceiver(store) as reader:
                        found.append(integration.save_adapter(reader, tmp_path))
            shutil.rmtree(store)
        first, last = found[0], found[-1]
        assert first.version == last.version == 1
        assert first.path != last.path
        assert first.number != last.number
        assert last.path.is_dir()
        saved = PeftModel.from_pretrained(make_model("qwen3", 0), last.path)
        assert bits(reference(saved)) == bits(reference(model_of(2)))

    def test_one_that_was_overwritten_meanwhile_is_not_saved(
        self, store, receiver, tmp_path, monkeypatch
    ):
        from safetensors import torch as safetensors_torch

        model = model_of(1)
        with dbuffer.WeightSender(store, reader_timeout_s=0.0) as sender:
            integration.send_adapter(sender, model)
            save_file = safetensors_torch.save_file

            def save_slowly(*args: Any) -> None:
                save_file(*args)
                for _ in range(2):
                    integration.send_adapter(sender, model)

            monkeypatch.setattr(safetensors_torch, "save_file", save_slowly)
            with pytest.raises(dbuffer.SnapshotEvictedError):
                integration.save_adapter(receiver, tmp_path)
            assert list(tmp_path.iterdir()) == []
            monkeypatch.undo()
            assert integration.save_adapter(receiver, tmp_path).version == 3
