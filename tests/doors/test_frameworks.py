"""Loops that others wrote, around the optimizers of `arrayopt.torch`: ``make test-doors`` has what they need."""

import copy
import importlib
import warnings

import numpy as np
import pytest
import torch

import arrayopt as ao
from arrayopt.torch import LAMB, AdamW

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, about versions, folders and numbers of workers


def library(name):
    """A library, or a skip that says what to do."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported ({error}): make test-doors installs it")


def problem():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    return net, torch.randn(32, 6), torch.randint(0, 2, (32,))


def batches(x, y, size=8):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=size)


def trained(net, x, y, epochs, lr=lambda step: 0.05, **options):
    """What an `arrayopt.Optimizer` makes of the same batches, in order."""
    net = copy.deepcopy(net)
    opt = ao.Optimizer(dict(net.named_parameters()), ao.LAMB(lr=lr), engine="array_api", **options)
    for _ in range(epochs):
        for a, b in batches(x, y):
            net.zero_grad()
            torch.nn.functional.cross_entropy(net(a), b).backward()
            opt.step({name: p.grad for name, p in net.named_parameters()})
    return [p.detach() for p in net.parameters()]


def equal(net, expected):
    return all(torch.equal(p.detach(), q) for p, q in zip(net.parameters(), expected, strict=True))


def test_accelerate(tmp_path):
    accelerate = library("accelerate")
    net, x, y = problem()
    expected = trained(net, x, y, 2, lambda step: 0.05 * 0.9**step)
    accelerator = accelerate.Accelerator(cpu=True)
    opt = LAMB(net.parameters(), lr=0.05, engine="array_api")
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.9**step)
    net, opt, data, schedule = accelerator.prepare(net, opt, batches(x, y), schedule)
    for epoch in range(2):
        for a, b in data:
            with accelerator.accumulate(net):
                opt.zero_grad()
                accelerator.backward(torch.nn.functional.cross_entropy(net(a), b))
                opt.step()
                schedule.step()
        if epoch == 0:
            accelerator.save_state(tmp_path)
    assert equal(net, expected)
    accelerator.load_state(tmp_path)
    for a, b in data:
        opt.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(net(a), b))
        opt.step()
        schedule.step()
    assert equal(net, expected)


@pytest.mark.parametrize("automatic", [True, False])
def test_lightning(automatic, tmp_path):
    lightning = library("lightning")
    net, x, y = problem()
    expected = trained(net, x, y, 2, lambda step: 0.05 * 0.9**step)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.automatic_optimization = copy.deepcopy(net), automatic

        def training_step(self, batch, index):
            a, b = batch
            loss = torch.nn.functional.cross_entropy(self.net(a), b)
            if not automatic:
                opt, schedule = self.optimizers(), self.lr_schedulers()
                opt.zero_grad()
                self.manual_backward(loss)
                opt.step()
                schedule.step()
            return loss

        def configure_optimizers(self):
            opt = LAMB(self.parameters(), lr=0.05, engine="array_api")
            schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.9**step)
            return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def trainer(epochs):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        return lightning.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            default_root_dir=tmp_path,
            enable_checkpointing=False,
            **quiet,
        )

    module, first = Module(), trainer(1)
    first.fit(module, batches(x, y))
    first.save_checkpoint(tmp_path / "one.ckpt")
    resumed = Module()
    trainer(2).fit(resumed, batches(x, y), ckpt_path=tmp_path / "one.ckpt")
    assert equal(resumed.net, expected)


@pytest.fixture
def bert():
    transformers = library("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=8, **sizes)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return transformers, transformers.BertForSequenceClassification(config)


def trainer(transformers, model, folder, steps, optimizers=(None, None), **options):
    torch.manual_seed(1)
    tokens, labels = torch.randint(0, 20, (16, 8)), torch.randint(0, 2, (16,))
    data = [{"input_ids": a, "labels": b} for a, b in zip(tokens, labels, strict=True)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_steps=3,
        max_grad_norm=1.0,
        seed=0,
        **options,
    )
    return transformers.Trainer(model, arguments, train_dataset=data, optimizers=optimizers)


def test_the_trainer_of_transformers(bert, tmp_path):
    """With groups, a schedule and clipping; resumed from a checkpoint, it ends at the same parameters."""
    transformers, model = bert

    def run(folder, steps, resume=None):
        net = copy.deepcopy(model)
        biases = [p for name, p in net.named_parameters() if name.endswith("bias")]
        rest = [p for name, p in net.named_parameters() if not name.endswith("bias")]
        groups = [{"params": rest}, {"params": biases, "weight_decay": 0.0}]
        opt = LAMB(groups, lr=0.01, weight_decay=0.1, engine="array_api")
        schedule = transformers.get_linear_schedule_with_warmup(opt, 2, 6)
        loop = trainer(transformers, net, folder, steps, (opt, schedule))
        found = loop.train(resume_from_checkpoint=resume)
        assert np.isfinite(found.training_loss)
        return [p.detach() for p in net.parameters()], opt

    straight, opt = run(tmp_path / "straight", 6)
    assert opt.inner.step_count == 6
    assert opt.param_groups[1]["weight_decay"] == 0.0
    assert opt.param_groups[0]["lr"] == 0.0
    resumed, _ = run(tmp_path / "resumed", 6, str(tmp_path / "straight" / "checkpoint-3"))
    assert all(torch.equal(p, q) for p, q in zip(straight, resumed, strict=True))


def test_the_trainer_makes_the_optimizer_itself(bert, tmp_path):
    transformers, model = bert
    before = copy.deepcopy(model)
    loop = trainer(transformers, model, tmp_path, 2)
    loop.optimizer_cls_and_kwargs = (AdamW, {"lr": 0.01, "betas": (0.9, 0.99), "engine": "array_api"})
    loop.train()
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
