"""HybridParallelStrategy: any mix of data, ZeRO, tensor, pipeline and context parallelism for an unmodified LightningModule."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_par.checkpoint import CURRENT_STATE, Shard
from lightning_par.checkpoint.files import local_path
from lightning_par.checkpoint.savers import Background, Immediate, Saver
from lightning_par.comm import Mesh
from lightning_par.layout import LayoutError, ParallelLayout, RankGrid
from lightning_par.numerics import seed_streams
from lightning_par.pipeline import PipelineError
from lightning_par.precision import ParallelPrecision
from lightning_par.strategy import seams, state
from lightning_par.strategy.assemble import Assembled, assemble, require_uncut
from lightning_par.strategy.epoch_ends import last_stage_speaks
from lightning_par.strategy.facts import model_facts
from lightning_par.strategy.frozen import empty_optimizers, require_parameters
from lightning_par.strategy.refusals import loop_violations, module_violations
from lightning_par.strategy.rehearsal import Rehearsal
from lightning_par.strategy.resuming import DataPlace
from lightning_par.strategy.sampling import ReplicaSampler
from lightning_par.strategy.saving import Attendance, Holdings, foreseen, saving_violations, settle
from lightning_par.strategy.schedules import wait_for_steps
from lightning_par.strategy.steps import StepRunner
from lightning_par.strategy.weight_averaging import has_averages, open_weights
from lightning_par.zero import BufferSync, DataParallel, ModelGradients, ReduceGroups, ZeroOptions, synchronize_batch_norms

DEFAULT_TIMEOUT = timedelta(minutes=30)


class HybridParallelStrategy(ParallelStrategy):
    """Trains one LightningModule, written for one device, under a parallel layout.

    Args:
        layout: the degrees of all axes; or give its fields as keywords.
        zero_options: bucket size, prefetching and the like: a ``ZeroOptions`` or its fields as a dict.
        async_save: checkpoints that are saved during a fit are written while it goes on: a save takes the time to copy this rank's shards
            to host memory, and that much of it. See Note [Saving while training goes on] in ``saving``.
        restore_optimizer: False: a fit with ``ckpt_path`` takes no state of optimizers from the checkpoint, and needs none there.
        timeout: of a collective: how long a rank waits for the others.
        layout_fields: the fields of ``ParallelLayout``: dp, tp, pp, cp, zero, replicate, schedule, chunks, microbatches, balance.

    Raises:
        LayoutError: for a layout that cannot run, with every reason: at once where the fields alone tell, and when a run starts, before
            any process is started or joined, where the world size or the model tell.

    Example::

        Trainer(devices=4, strategy=HybridParallelStrategy(tp=2, pp=2))
    """

    def __init__(
        self,
        layout: ParallelLayout | None = None,
        *,
        zero_options: ZeroOptions | Mapping[str, Any] | None = None,
        async_save: bool = False,
        restore_optimizer: bool = True,
        timeout: timedelta = DEFAULT_TIMEOUT,
        **layout_fields: Any,
    ) -> None:
        super().__init__()
        if not isinstance(zero_options, ZeroOptions | Mapping | None):
            raise TypeError(f"zero_options={zero_options!r}: give ZeroOptions, or its fields as a dict")
        if not isinstance(async_save, bool):
            raise TypeError(f"async_save={async_save!r}: give True or False")
        if not isinstance(restore_optimizer, bool):
            raise TypeError(f"restore_optimizer={restore_optimizer!r}: give True or False")
        if not isinstance(timeout, timedelta):
            raise TypeError(f"timeout={timeout!r}: give a datetime.timedelta, as in timedelta(minutes=30)")
        self.zero_options = zero_options if isinstance(zero_options, ZeroOptions) else ZeroOptions.of(zero_options or {})
        self.requested = _layout_of(layout, layout_fields)
        self.async_save, self.restore_optimizer = async_save, restore_optimizer
        self.timeout = timeout
        self.num_nodes = 1
        self._mesh: Mesh | None = None
        self._attendance: Attendance | None = None
        self._saver: Saver | None = None
        self._trains = False
        self._assembled: Assembled | None = None
        self._runner: StepRunner | None = None
        self._data_parallel: DataParallel | None = None
        self._orders: state.Orders = []
        self._place = DataPlace()
        self._until_teardown = ExitStack()

    # --- where this rank stands --------------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning puts in a sampler of its own: for prediction, which repeats no sample. See ``process_dataloader``."""
        return seams.predicts(self._lightning_module)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Divide the samples over the replicas, and go on where a checkpoint ended.

        See Note [The order of samples] in ``sampling`` and Note [The next sample] in ``resuming``.
        """
        trainer = self.lightning_module.trainer
        if self.is_distributed:
            return dataloader
        divided = self._divided(trainer, dataloader) if seams.wants_sampler(trainer, dataloader) else dataloader
        if trainer.training:
            return self._place.enter(trainer, self.mesh, divided)
        self._place.enter_validation(trainer, divided)
        return divided

    def _divided(self, trainer: pl.Trainer, dataloader: DataLoader) -> DataLoader:
        place = self.distributed_sampler_kwargs
        order = seams.order_of(dataloader)
        users = order.sampler if isinstance(order, ReplicaSampler) else order  # a CombinedLoader keeps dataloaders that were divided
        sampler = ReplicaSampler(users, place["num_replicas"], place["rank"], self.mesh.world, self.root_device)
        if sampler.repeated and not trainer.training:
            rank_zero_warn(
                f"{len(users)} samples do not divide by dp={place['num_replicas']}: {sampler.repeated} of them count twice in "
                "this evaluation. Make the data set a multiple, or evaluate with dp=1"
            )
        divided = seams.with_sampler(dataloader, sampler)
        seams.seed_workers(divided, place["rank"])
        return divided

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def layout(self) -> ParallelLayout:
        """The layout with ``dp`` resolved for this world."""
        return self.requested.resolve(self.num_nodes * self.num_processes)

    @property
    def mesh(self) -> Mesh:
        """The process groups; there once the Trainer has set up its environment."""
        if self._mesh is None:
            raise RuntimeError("the mesh is there once the Trainer runs (fit, validate, test or predict)")
        return self._mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Samples are divided over the dp replicas: all ranks of a replica get the same batch."""
        layout = self.layout
        return {"num_replicas": layout.dp, "rank": RankGrid(layout).coordinates(self.global_rank)["dp"]}

    def set_world_ranks(self) -> None:
        """Lightning calls this when it knows devices and nodes."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        seams.set_logged_rank(self.global_rank)

    # --- start -------------------------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = seams.CheckedLauncher(self.cluster_environment, self.num_processes, self.num_nodes, self._check)

    def _check(self, trainer: pl.Trainer, data: object) -> None:
        """Before any process starts: every rule of the layout, and what a LightningModule must not do under it."""
        module = self.lightning_module
        if module is not None and self._is_whole(module):
            require_uncut(module)
        facts = model_facts(module, data) if module is not None else None
        if facts is not None and not self._fits(trainer):  # evaluation takes fewer micro-batches where a batch is small
            facts = replace(facts, batch=None)
        ranks = self.num_nodes * self.num_processes
        violations = self.requested.violations(ranks, facts)
        if module is not None and self._fits(trainer):
            violations += loop_violations(self.requested, ranks, module, trainer)
            violations += saving_violations(trainer, async_save=self.async_save)
        if module is not None and self._is_whole(module) and not violations:
            violations += module_violations(self.requested, module)
        if trainer.state.fn == TrainerFn.PREDICTING and self.requested.cp > 1:
            violations.append(f"predict with cp={self.requested.cp}: outputs of context shards are not joined; use a layout with cp=1")
        if violations:
            raise LayoutError(violations)

    def _is_whole(self, module: pl.LightningModule) -> bool:
        """The user has built the module, and no axis has cut it yet."""
        is_built = type(module).configure_model is pl.LightningModule.configure_model or self._mesh is not None
        return is_built and (self._assembled is None or self._assembled.module is not module)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        seams.logged_values_are_synced()
        self.set_world_ranks()
        module = self.lightning_module
        if self.layout.zero == 3 and module is not None:  # callbacks are set up before the strategy, and an earlier fit may have sharded it
            self._until_teardown.enter_context(open_weights(module.trainer, module))
        seams.join_world(self.cluster_environment, self.root_device, self.timeout)
        if self._mesh is None:
            seed_streams()
            self._mesh = Mesh.build(self.layout, timeout=self.timeout)
            self._attendance = Attendance(self._mesh.world)
            self._saver = Background(self._mesh.world) if self.async_save else Immediate(self._mesh.world)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        seams.note_sigterm(trainer)
        self._place.forget()
        module = self.lightning_module
        assert module is not None
        if self._assembled is None or self._assembled.module is not module:
            self._check(trainer, trainer.datamodule)
            if self._data_parallel is not None:
                self._data_parallel.close()
                self._data_parallel = None
            if self._layer_sync is not None:
                synchronize_batch_norms(module, self.mesh.data)
            self.precision_plugin.convert_module(module)
            if self.precision_plugin.mode.weights is not None:
                seams.tell_dtype(module, self.precision_plugin.mode.weights)
            self.precision_plugin.use(self.root_device, None)
            rehearsal = self._rehearsal(trainer, module) if self.layout.pp > 1 else None
            self._assembled = assemble(module, self.mesh, self.root_device, rehearsal)
        self.model = module
        if self._data_parallel is None or self.layout.zero < 3:
            self.model_to_device()
        if self._data_parallel is None and self.layout.zero == 3:
            self._data_parallel = self._shard([])
        self._buffers = BufferSync(state.buffer_places(self._assembled).values(), self.mesh.data)
        state.share_rng(self.mesh)
        seams.restrict_metrics(module, self.mesh.dp)
        if self.layout.pp > 1:
            self._until_teardown.enter_context(last_stage_speaks(module, self.mesh, self.root_device))
        self._runner = StepRunner(module, self.mesh, self._assembled.pipeline, self.root_device)
        self.precision_plugin.use(self.root_device, None)
        if self._fits(trainer):
            self.setup_optimizers(trainer)
            if isinstance(self._saver, Background):
                self._until_teardown.enter_context(foreseen(trainer, self._saver))
        self.setup_precision_plugin()
        seams.pass_on_zero_grad(self)

    def _rehearsal(self, trainer: pl.Trainer, module: pl.LightningModule) -> Rehearsal:
        plugin = self.precision_plugin
        contexts = {
            TrainerFn.FITTING: plugin.train_step_context,
            TrainerFn.VALIDATING: plugin.val_step_context,
            TrainerFn.TESTING: plugin.test_step_context,
            TrainerFn.PREDICTING: plugin.predict_step_context,
        }
        return Rehearsal(module, self.mesh, self.root_device, contexts[trainer.state.fn])

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        with empty_optimizers() if self.layout.pp > 1 else nullcontext():
            super().setup_optimizers(trainer)
        require_parameters(self.optimizers, self.mesh.pp)
        self._orders = state.orders(self.optimizers, self._part)
        if self._data_parallel is None or self.layout.zero < 3:
            earlier, self._data_parallel = self._data_parallel, self._shard(self.optimizers)
            if earlier is not None:
                self._data_parallel.take_over(earlier)
        for optimizer in self.optimizers:
            self._data_parallel.attach(optimizer)
        self.precision_plugin.use(self.root_device, self._gradients)
        if self.precision_plugin.scale is not None:
            self._until_teardown.enter_context(wait_for_steps(self.lightning_module, self.precision_plugin.steps))

    def _shard(self, optimizers: list[Optimizer]) -> DataParallel:
        part, stage = self._part, self.layout.zero
        groups = ReduceGroups.of(self.mesh)
        half, scaled = self.precision_plugin.half, self.precision_plugin.mode.scaled
        return DataParallel(
            part.module, part.parameters, groups, stage=stage, options=self.zero_options, optimizers=optimizers, half=half, scaled=scaled
        )

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    @override
    def on_exception(self, exception: BaseException) -> None:
        seams.fail_on_sigterm(exception)
        self._finish_saving(interrupted=True)
        if isinstance(self._launcher, seams.CheckedLauncher):
            self._launcher.end_others()

    @override
    def teardown(self) -> None:
        module = self._lightning_module
        if self._saver is not None:
            self._finish_saving(interrupted=module.trainer.interrupted)
            self._saver.close()
        self._until_teardown.close()
        self.precision_plugin.steps.clear()
        if self._assembled is None:  # set-up failed: the module is as it was, perhaps sharded by another strategy
            self._lightning_module = None
        if self._data_parallel is not None and self.layout.zero == 3:  # values stay sharded: no rank may have room for all of them
            if not module.trainer.interrupted:
                self._data_parallel.require_alike()
            self._data_parallel.release()
            self._lightning_module = None
        elif self._data_parallel is not None:
            self._data_parallel.close()  # and kept: it knows what the optimizers hold, which may be saved after the fit
        super().teardown()
        self._lightning_module = module

    @property
    @override
    def precision_plugin(self) -> ParallelPrecision:
        return self._precision_plugin if self._precision_plugin is not None else ParallelPrecision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        asked = seams.asked_precision() if precision_plugin is not None and precision_plugin.precision == "bf16-mixed" else None
        self._precision_plugin = None if precision_plugin is None else ParallelPrecision.of(precision_plugin, asked)

    # --- steps -------------------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._buffers.broadcast()
        step, context = self.lightning_module.training_step, self.precision_plugin.train_step_context
        if self._part.pipeline is None:
            return self.runner.train(step, context, args, kwargs)
        trainer, data_parallel = self.lightning_module.trainer, self.data_parallel
        if seams.zeroes_gradients(trainer, self._batch_idx):
            data_parallel.clear()
        data_parallel.loss_scale = self.precision_plugin.loss_scale
        share, scaled = seams.backward_multiplier(trainer), self.precision_plugin.scaled
        loss = self.runner.train_pipeline(step, context, data_parallel, args, kwargs, scaled=lambda loss: scaled(loss * share))
        data_parallel.withhold()
        return loss

    @override
    def on_train_start(self) -> None:
        self._trains = True
        trainer = self.lightning_module.trainer
        self._place.begin(trainer)
        if trainer.num_training_batches < trainer.accumulate_grad_batches:
            rank_zero_warn(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches}, but an epoch has {trainer.num_training_batches} batches: as "
                f"Lightning does, each epoch ends with a step, whose gradient is divided by {trainer.accumulate_grad_batches} nonetheless"
            )

    @override
    def on_train_end(self) -> None:
        self._finish_saving()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._batch_idx = batch_idx
        self._place.begin_batch(self.lightning_module.trainer, batch_idx, lambda: state.persistent_buffers(self._part))

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward, then the reduction of gradients over all axes, then ``on_after_backward``: hooks see reduced gradients."""
        self.pre_backward(closure_loss)
        self.data_parallel.loss_scale = self.precision_plugin.loss_scale
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        with self.runner.attention():
            self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        self.data_parallel.restore()
        self.data_parallel.finish()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with self.data_parallel.no_sync():
            yield

    def grad_norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor:
        """The norm of the whole model's gradient, before clipping if asked in ``on_before_optimizer_step``. All ranks call."""
        return self._gradients.norm(optimizer, norm_type)

    @property
    def _gradients(self) -> ModelGradients:
        mesh = self.mesh
        groups = (mesh.copy if self.data_parallel.disjoint else mesh.model,)
        return ModelGradients(self.data_parallel, groups, mesh.world, self.root_device)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluate("validation_step", self.precision_plugin.val_step_context, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context, args, kwargs)

    def _evaluate(self, name: str, context: Callable[[], AbstractContextManager], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._buffers.broadcast()
        output = self.runner.evaluate(name, getattr(self.lightning_module, name), context, args, kwargs)
        if self._data_parallel is not None:
            self._data_parallel.end_pass()
        return output

    @property
    def data_parallel(self) -> DataParallel:
        """The gradient buckets; there from the first fit on."""
        if self._data_parallel is None:
            raise RuntimeError("there are no gradients before the Trainer fits")
        return self._data_parallel

    @property
    def runner(self) -> StepRunner:
        assert self._runner is not None, "set up first"
        return self._runner

    @property
    def _part(self) -> Assembled:
        assert self._assembled is not None, "set up first"
        return self._assembled

    # --- communication that Lightning asks for -----------------------------------------------------------------------------------

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Combine a value over the data-parallel replicas: ranks of one replica hold the same one (context shards: their mean).

        ``reduce_op``: mean (of integers too: a float), sum, min or max.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        mesh, name = self.mesh, str(getattr(reduce_op, "name", reduce_op)).lower()
        if name in ("min", "max"):
            result = tensor.clone()
            mesh.data.all_reduce(result, name)
            return result
        result = tensor.clone() if tensor.is_floating_point() else tensor.double() if name in ("mean", "avg") else tensor.clone()
        mesh.data.all_reduce(result)
        parts = mesh.data.size if name in ("mean", "avg") else mesh.cp.size
        return result / parts if result.is_floating_point() else result // parts

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """[dp, ...]: the tensor of every data-parallel replica, or of the ranks of ``group``; with one replica the tensor itself."""
        self._require_all_ranks("all_gather")
        if group is not None:
            return super().all_gather(tensor, group, sync_grads)
        return seams.gather(tensor, self.mesh.dp, sync_grads=sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._require_all_ranks("reduce_boolean_decision")
        if self._is_alone:
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        self.mesh.world.all_reduce(votes, "min" if all else "max")
        return bool(votes)

    @override
    def barrier(self, name: str | None = None) -> None:
        self._require_all_ranks("barrier")
        if name == "Trainer.save_checkpoint":
            return  # a save ends together by itself, or in the background
        if self._mesh is not None and not self._is_alone:
            self._mesh.world.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._require_all_ranks("broadcast")
        return obj if self._mesh is None or self._is_alone else self._mesh.world.broadcast_object(obj, src)

    def _require_all_ranks(self, call: str) -> None:
        """Raise where some ranks would wait in ``call`` for others that never come: in a step of a pipeline."""
        pipeline = self._assembled.pipeline if self._assembled is not None else None
        if pipeline is not None and pipeline.layers.in_step:
            raise PipelineError(
                f"{call} within a step with pp={self.layout.pp}: all ranks must call it together, but only the last stage comes to the end "
                "of a step, once for each micro-batch. Call it in a hook, as on_train_batch_end or on_validation_epoch_end, average what "
                "you log by self.log(..., sync_dist=True), or use pp=1"
            )

    @property
    def _is_alone(self) -> bool:
        """The other ranks do not come any more."""
        return self._attendance is not None and self._attendance.is_alone

    # --- state -------------------------------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """The whole module's parameters and buffers on CPU, under its original names, on rank 0; None elsewhere. All ranks call."""
        self._require_all_ranks("full_state_dict")
        return self._holdings.full_state_dict()

    @property
    def _holdings(self) -> Holdings:
        if self._assembled is None or self._assembled.module is not self.lightning_module:
            raise RuntimeError(
                "the module is divided among the ranks, and can be saved, from on_fit_start on: a callback's `setup` comes before that. "
                "Save in on_fit_start"
            )
        return Holdings(self._part, self._data_parallel, self.optimizers, self._orders, self.root_device)

    @override
    def lightning_module_state_dict(self) -> dict[str, Shard]:
        return self._holdings.module_shards()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._holdings.optimizer_state(getattr(optimizer, "_optimizer", optimizer))

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None) -> None:
        """Write a sharded folder; all ranks call. See Note [A complete folder] in ``checkpoint.native``."""
        self._require_all_ranks("save_checkpoint")
        if storage_options is not None:
            raise TypeError("storage_options are for a CheckpointIO plugin; this strategy writes its own sharded folders")
        assert self._attendance is not None
        assert self._saver is not None
        filepath, module = local_path(filepath), self.lightning_module
        interrupted = module is not None and module.trainer.interrupted
        settle(self._saver, interrupted=interrupted)
        if self._attendance.all_come_to_save(filepath, interrupted=interrupted):
            with self._place.written(checkpoint, self.lightning_module.trainer, self.mesh):
                self._holdings.save(checkpoint, filepath, self._saver)
        if not self._trains or seams.ends_job(filepath):
            settle(self._saver, interrupted=interrupted)

    @override
    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Delete a checkpoint of any kind: with ``async_save`` after the save under way, and only if that succeeds."""
        if self._saver is not None:
            self._saver.remove(os.path.abspath(filepath))

    def wait_for_checkpoint(self) -> None:
        """Until the checkpoint that ``async_save`` has under way is complete. Any rank may call; a fit that ends does so itself.

        Raises:
            CheckpointError: on every rank, if any rank could not write its part.
        """
        if self._saver is not None:
            self._saver.wait()

    def _finish_saving(self, *, interrupted: bool = False) -> None:
        """From here on, what is saved is complete when the save returns."""
        self._trains = False
        if self._saver is not None:
            settle(self._saver, interrupted=interrupted)

    @override
    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
        """The plain part of a checkpoint of any format; ``load_model_state_dict`` and ``load_optimizer_state_dict`` read the tensors."""
        self.wait_for_checkpoint()
        trainer = self.lightning_module.trainer
        checkpoint = seams.completed(self._holdings.load(checkpoint_path), trainer)
        if self._fits(trainer):
            self._until_teardown.enter_context(self._place.read(checkpoint, trainer, self.mesh))
            if not self.restore_optimizer:
                checkpoint.setdefault("lr_schedulers", [])
        return checkpoint

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return self.restore_optimizer

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._holdings.load_model(checkpoint, strict=strict)
        trainer = self.lightning_module.trainer
        if has_averages(trainer.callbacks):
            self._holdings.load_averages(checkpoint, strict=strict)
        elif self._fits(trainer) and CURRENT_STATE in checkpoint:
            rank_zero_warn(
                "the weights of the checkpoint are averages of those that were trained, and training goes on from the averages: to go on "
                "from both, give the Trainer the WeightAveraging callback again"
            )
        if not self.restore_optimizer and self._fits(trainer):
            self._holdings.restore_rng(checkpoint)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._holdings.load_optimizers(checkpoint)

    @staticmethod
    def _fits(trainer: pl.Trainer) -> bool:
        return trainer.state.fn == TrainerFn.FITTING


def _layout_of(layout: ParallelLayout | None, fields: dict[str, Any]) -> ParallelLayout:
    known = ParallelLayout.__dataclass_fields__
    if layout is not None and not isinstance(layout, ParallelLayout):
        raise TypeError(f"layout={layout!r}: give a ParallelLayout, or its fields as keywords: HybridParallelStrategy(tp=2, pp=2)")
    if unknown := [name for name in fields if name not in known]:
        raise TypeError(f"unknown layout fields {', '.join(unknown)}: choose among {', '.join(known)}")
    return replace(layout, **fields) if layout is not None else ParallelLayout(**fields)
