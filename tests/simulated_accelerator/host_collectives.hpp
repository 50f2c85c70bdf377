// Collectives of an accelerator's tensors for tests: Gloo moves copies in the host's memory.
//
// A result is in its tensor only once somebody has waited, as with NCCL. The simulated accelerator uses them, and tests
// whose ranks share one GPU, which NCCL refuses.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <mutex>

using at::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct HostWork final : c10d::Work {
  WorkPtr gloo;
  Tensors outputs;
  std::function<void()> finish;
  std::once_flag finished;
  c10::intrusive_ptr<c10::ivalue::Future> future;

  bool isCompleted() override { return gloo->isCompleted(); }
  bool isSuccess() const override { return gloo->isSuccess(); }
  std::exception_ptr exception() const override { return gloo->exception(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    const bool done = gloo->wait(timeout);
    std::call_once(finished, finish);
    return done;
  }
  void synchronize() override { wait(); }
  void abort() override { gloo->abort(); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (!future) {
      wait();
      future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      future->markCompleted(c10::IValue(outputs));
    }
    return future;
  }
};

struct HostCollectives final : c10d::Backend {
  using Download = Tensor (*)(const Tensor&);            // a copy of a device's tensor in the host's memory
  using Upload = void (*)(const Tensor&, const Tensor&);  // writes the second, on the host, into the first
  std::string name;
  c10::intrusive_ptr<c10d::Backend> gloo;
  Download download;
  Upload write;

  HostCollectives(std::string name, c10::intrusive_ptr<c10d::Backend> gloo, Download download, Upload upload)
      : Backend(gloo->getRank(), gloo->getSize()),
        name(std::move(name)),
        gloo(std::move(gloo)),
        download(download),
        write(upload) {}
  const std::string getBackendName() const override { return name; }

  Tensor copied(const Tensor& tensor) const { return download(tensor); }
  Tensors copied(const Tensors& tensors) const {
    Tensors made;
    for (auto& tensor : tensors) made.push_back(copied(tensor));
    return made;
  }
  std::vector<Tensors> copied(const std::vector<Tensors>& lists) const {
    std::vector<Tensors> made;
    for (auto& list : lists) made.push_back(copied(list));
    return made;
  }
  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors all;
    for (auto& list : lists) all.insert(all.end(), list.begin(), list.end());
    return all;
  }
  static WorkPtr work(WorkPtr gloo, Tensors outputs, std::function<void()> finish) {
    auto made = c10::make_intrusive<HostWork>();
    made->gloo = std::move(gloo);
    made->outputs = std::move(outputs);
    made->finish = std::move(finish);
    return made;
  }
  WorkPtr work(WorkPtr gloo, const Tensors& to, const Tensors& from) const {
    return work(std::move(gloo), to, [write = write, to, from] {
      for (size_t i = 0; i < to.size(); i++) write(to[i], from[i]);
    });
  }
  // Gloo has no mean.
  static bool is_mean(c10d::ReduceOp& op) {
    const bool mean = op == c10d::ReduceOp::AVG;
    if (mean) op = c10d::ReduceOp::SUM;
    return mean;
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = copied(tensors);
    return work(gloo->broadcast(host, options), tensors, host);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = copied(tensors);
    auto own = options;
    const int parts = is_mean(own.reduceOp) ? size_ : 1;
    return work(gloo->allreduce(host, own), tensors, [write = write, tensors, host, parts] {
      for (size_t i = 0; i < host.size(); i++) write(tensors[i], parts > 1 ? host[i].div(parts) : host[i]);
    });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto host = copied(tensors);
    return work(gloo->allreduce_coalesced(host, options), tensors, host);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto host = copied(tensors);
    return work(gloo->reduce(host, options), tensors, host);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = copied(outputs);
    auto from = copied(inputs);
    return work(gloo->allgather(to, from, options), flat(outputs), flat(to));
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto to = copied(output), from = copied(input);
    return work(gloo->_allgather_base(to, from, options), Tensors{output}, Tensors{to});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    auto to = copied(outputs), from = copied(inputs);
    return work(gloo->allgather_into_tensor_coalesced(to, from, options), outputs, to);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto to = copied(outputs);
    auto from = copied(inputs);
    return work(gloo->gather(to, from, options), flat(outputs), flat(to));
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto to = copied(outputs);
    auto from = copied(inputs);
    return work(gloo->scatter(to, from, options), outputs, to);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    copied(output);  // for its checks
    Tensors host{copied(input)};
    c10d::AllreduceOptions own;
    own.reduceOp = options.reduceOp;
    const int parts = is_mean(own.reduceOp) ? size_ : 1, ranks = size_, rank = rank_;
    Tensor to = output;
    return work(gloo->allreduce(host, own), Tensors{output}, [=, write = write] {
      Tensor row = host[0].view({ranks, -1})[rank];
      write(to, parts > 1 ? row.div(parts) : row);
    });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    Tensors rows;
    for (auto& tensor : inputs[0]) rows.push_back(tensor.reshape({-1}));
    Tensor whole = at::cat(rows);
    return _reduce_scatter_base(outputs[0], whole, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    WorkPtr last;
    for (size_t i = 0; i < outputs.size(); i++) {
      last = _reduce_scatter_base(outputs[i], inputs[i], options);
      last->wait();
    }
    return last;
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    auto to = copied(output), from = copied(input);
    return work(gloo->alltoall_base(to, from, output_sizes, input_sizes, options), Tensors{output}, Tensors{to});
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto to = copied(outputs), from = copied(inputs);
    return work(gloo->alltoall(to, from, options), outputs, to);
  }
  WorkPtr send(Tensors& tensors, int target, int tag) override {
    auto host = copied(tensors);
    return work(gloo->send(host, target, tag), tensors, [host] {});
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    auto host = copied(tensors);
    return work(gloo->recv(host, source, tag), tensors, host);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto own = options;
    own.device_ids.clear();
    return gloo->barrier(own);
  }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  void shutdown() override { gloo->shutdown(); }
  void abort() override { gloo->abort(); }
};
