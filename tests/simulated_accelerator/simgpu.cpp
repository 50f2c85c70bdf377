// A simulated accelerator for tests: the device type that PyTorch keeps for plugins (PrivateUse1), with the CPU's kernels.
//
// Its tensors are not CPU tensors, its arithmetic is the CPU's, so a correct program gives the CPU's bits, and a program
// that forgets where its tensors are, or that a copy has not arrived yet, fails or gives garbage:
//  - Device memory has addresses that the host cannot dereference, and is filled with 0xff (NaN, or -1) when allocated.
//  - Operators refuse CPU tensors among device tensors, as CUDA's do, but for scalars and indices.
//  - A non_blocking copy from or to pinned memory happens only once a stream, an event or a kernel orders it. Until then
//    its target is filled with 0xff.
//  - A collective's result is in its tensor only after Work.wait().
//  - Every wait of the host for the device is counted.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>

#include "host_collectives.hpp"

using namespace at;

namespace simgpu {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr size_t kMemory = size_t(16) << 30;  // bytes that a device says it has

int device_count() {
  static const int count = [] {
    const char* text = std::getenv("SIMGPU_DEVICES");
    return text ? std::atoi(text) : 2;
  }();
  return count;
}

thread_local DeviceIndex current_device = 0;

// What tests count. A sync is a wait of the host for the device.
std::atomic<int64_t> sync_count{0}, kernel_count{0}, deferred_count{0};

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

// --- addresses -------------------------------------------------------------------------------------------------------
// Bit 62 makes an address that no x86-64 or ARM64 process can dereference.

constexpr uintptr_t kTag = uintptr_t(1) << 62;

void* to_device_address(void* host) { return host ? (void*)((uintptr_t)host | kTag) : host; }
void* to_host_address(const void* device) { return (void*)((uintptr_t)device & ~kTag); }

// --- streams: deferred copies, in order, until something orders them -----------------------------------------------------

struct Waiting {
  std::function<void()> copy;
  const void* source;  // the memory that it reads
};

struct Queue {
  std::deque<Waiting> waiting;
  uint64_t pushed = 0, done = 0;
};

using StreamKey = std::pair<int, int64_t>;  // device, stream

std::map<StreamKey, Queue>& queues() {
  static auto* all = new std::map<StreamKey, Queue>;
  return *all;
}

int64_t& current_stream(int device) {
  static thread_local std::map<int, int64_t> streams;
  return streams[device];
}

void run_until(StreamKey stream, uint64_t number) {
  Lock lock(mutex);
  auto& queue = queues()[stream];
  while (queue.done < number && !queue.waiting.empty()) {
    auto copy = std::move(queue.waiting.front().copy);
    queue.waiting.pop_front();
    queue.done++;
    copy();
  }
}

void finish_stream(StreamKey stream) { run_until(stream, UINT64_MAX); }

void finish_device(int device) {
  Lock lock(mutex);
  for (auto& [stream, queue] : queues())
    if (stream.first == device) finish_stream(stream);
}

// Whether a copy that has not run yet reads this memory.
bool is_awaited(const void* memory) {
  Lock lock(mutex);
  for (auto& [stream, queue] : queues())
    for (auto& each : queue.waiting)
      if (each.source == memory) return true;
  return false;
}

void defer(int device, std::function<void()> copy, const void* source) {
  Lock lock(mutex);
  auto& queue = queues()[{device, current_stream(device)}];
  queue.waiting.push_back({std::move(copy), source});
  queue.pushed++;
  deferred_count++;
}

// A kernel runs at once, after everything that its own stream has deferred; it does not order other streams.
void before_kernel(int device) { finish_stream({device, current_stream(device)}); }

// --- memory -----------------------------------------------------------------------------------------------------------

struct Block {
  int device;
  size_t size;
  void* data;    // owned bytes, or none where the block lends those of `lender`
  Tensor lender;
};

struct Allocator final : c10::DeviceAllocator {
  using Stats = c10::CachingDeviceAllocator::DeviceStats;
  std::map<int, Stats> stats;

  template <typename Change>
  void count(int device, Change change) {
    Lock lock(mutex);
    auto& s = stats[device];
    for (auto* bytes : {&s.allocated_bytes, &s.active_bytes, &s.reserved_bytes, &s.requested_bytes}) change((*bytes)[0]);
  }

  static void release(void* context) {
    auto* block = (Block*)context;
    get()->count(block->device, [&](auto& bytes) { bytes.decrease(block->size); });
    std::free(block->data);
    delete block;
  }

  DataPtr own(int device, size_t size, void* at, void* data, Tensor lender) {
    count(device, [&](auto& bytes) { bytes.increase(size); });
    return {to_device_address(at), new Block{device, size, data, std::move(lender)}, release, Device(kType, device)};
  }

  DataPtr allocate(size_t size) override {
    void* data = nullptr;
    if (size) {
      TORCH_CHECK_WITH(OutOfMemoryError, !posix_memalign(&data, 64, size), "simgpu: out of memory");
      std::memset(data, 0xff, size);
    }
    return own(current_device, size, data, data, {});
  }

  // A kernel's fresh result becomes device memory without a copy.
  DataPtr adopt(const Tensor& cpu, int device) {
    return own(device, cpu.storage().nbytes(), (void*)cpu.storage().data(), nullptr, cpu);
  }

  DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to_host_address(to), to_host_address(from), size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const DataPtr&, c10::Stream) override {}
  Stats getDeviceStats(DeviceIndex device) override { return stats[device]; }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    count(device, [](auto& bytes) { bytes.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return {kMemory - stats[device].allocated_bytes[0].current, kMemory};
  }

  static Allocator* get() {
    static auto* allocator = new Allocator;
    return allocator;
  }
};

struct PinnedAllocator final : c10::Allocator {
  std::map<uintptr_t, size_t> blocks;

  static void release(void* data) {
    {
      Lock lock(mutex);
      get()->blocks.erase((uintptr_t)data);
    }
    std::free(data);
  }

  DataPtr allocate(size_t size) override {
    void* data = nullptr;
    size = std::max<size_t>(size, 1);
    TORCH_CHECK(!posix_memalign(&data, 64, size), "out of memory");
    std::memset(data, 0xff, size);
    Lock lock(mutex);
    blocks[(uintptr_t)data] = size;
    return {data, data, release, Device(kCPU)};
  }

  DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }

  bool holds(const void* data) {
    Lock lock(mutex);
    auto after = blocks.upper_bound((uintptr_t)data);
    if (after == blocks.begin()) return false;
    --after;
    return (uintptr_t)data < after->first + after->second;
  }

  static PinnedAllocator* get() {
    static auto* allocator = new PinnedAllocator;
    return allocator;
  }
};

// --- generators ---------------------------------------------------------------------------------------------------------
// The CPU's generator on another device: a seed gives the CPU's numbers.

struct Generator final : CPUGeneratorImpl {
  explicit Generator(DeviceIndex device) {
    device_ = Device(kType, device);
    key_set_ = DispatchKeySet(DispatchKey::PrivateUse1);
  }
  static DeviceType device_type() { return kType; }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->set_state(*get_state());
    return copy;
  }
};

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < device_count(); i++) made->push_back(make_generator<Generator>(i));
    return made;
  }();
  return (*all)[device < 0 ? current_device : device];
}

void copy_state(CPUGeneratorImpl* to, CPUGeneratorImpl* from) {
  to->set_engine(from->engine());
  to->set_next_float_normal_sample(from->next_float_normal_sample());
  to->set_next_double_normal_sample(from->next_double_normal_sample());
}

// While it lives, the CPU's default generator is in the state of `own`, which gets the advanced state afterwards.
struct Borrowed {
  CPUGeneratorImpl *cpu, *own, before;
  explicit Borrowed(const at::Generator& generator)
      : cpu(check_generator<CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator())),
        own((CPUGeneratorImpl*)generator.unsafeGetGeneratorImpl()) {
    copy_state(&before, cpu);
    copy_state(cpu, own);
  }
  ~Borrowed() {
    copy_state(own, cpu);
    copy_state(cpu, &before);
  }
};

// --- what PyTorch asks of a device ------------------------------------------------------------------------------------

struct Event {
  StreamKey stream;
  uint64_t number;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Stream make(int device, int64_t stream) { return Stream(Stream::UNSAFE, Device(kType, device), stream); }
  static int index(Device device) { return device.has_index() ? device.index() : current_device; }
  static StreamKey key(const Stream& stream) { return {stream.device_index(), stream.id()}; }
  static void wait_for(void* event) {
    if (auto* e = (Event*)event) run_until(e->stream, e->number);
  }

  DeviceType type() const override { return kType; }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  Device getDevice() const override { return {kType, current_device}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < device_count(), "simgpu: invalid device ordinal ", (int)device.index());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }

  Stream getStream(Device device) const override { return make(index(device), current_stream(index(device))); }
  Stream getDefaultStream(Device device) const override { return make(index(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<int64_t> next{1};
    return make(index(device), next++);
  }
  Stream exchangeStream(Stream stream) const override {
    auto& current = current_stream(stream.device_index());
    Stream before = make(stream.device_index(), current);
    current = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    Lock lock(mutex);
    return queues()[key(stream)].waiting.empty();
  }
  void synchronizeStream(const Stream& stream) const override {
    sync_count++;
    finish_stream(key(stream));
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    sync_count++;
    finish_device(device);
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex);
    if (!*event) *event = new Event;
    *(Event*)*event = {key(stream), queues()[key(stream)].pushed};
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete (Event*)event; }
  void block(void* event, const Stream&) const override { wait_for(event); }
  bool queryEvent(void* event) const override {
    wait_for(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    sync_count++;
    wait_for(event);
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0.; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void resize_storage(StorageImpl* storage, size_t size) {
  before_kernel(storage->device().index());
  c10::DeviceGuard guard(storage->device());
  DataPtr fresh = Allocator::get()->allocate(size);
  if (size_t kept = std::min(size, storage->nbytes()))
    std::memcpy(to_host_address(fresh.get()), to_host_address(storage->data()), kept);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(size);
}

struct Hooks final : PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count(); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice({kType, device}); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = current_device;
    if (device >= 0) current_device = device;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return make_generator<Generator>(device < 0 ? current_device : device);
  }
  Device getDeviceFromPtr(void*) const override { return {kType, current_device}; }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::get()->holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return PinnedAllocator::get(); }
  void resizePrivateUse1Bytes(const Storage& storage, size_t size) const override {
    resize_storage(storage.unsafeGetStorageImpl(), size);
  }
};

// --- from device tensors to CPU tensors over the same bytes, and back -------------------------------------------------

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

Tensor tensor_over(Storage storage, DispatchKey key, const Tensor& like) {
  Tensor made = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

Tensor host_view(const Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  DataPtr data(to_host_address(tensor.storage().data()), Device(kCPU));
  Storage bytes(Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), c10::GetAllocator(kCPU), true);
  Tensor view = tensor_over(std::move(bytes), DispatchKey::CPU, tensor);
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

// One call of an operator: its device tensors, each with the CPU tensor that the CPU's kernel gets in its place.
struct Call {
  std::string name;
  bool takes_host_tensors = false;  // indices may be on the host
  bool takes_host_scalars = true;   // fused optimizers read their step counters on the device
  int device = -1;
  std::vector<std::pair<Tensor, Tensor>> arguments;

  Tensor in(const Tensor& tensor, bool written) {
    if (!tensor.defined()) return tensor;
    if (!on_device(tensor)) {
      const bool scalar = takes_host_scalars && tensor.dim() == 0 && !written;
      TORCH_CHECK(takes_host_tensors || scalar, name, ": Expected all tensors to be on the same device, but found at ",
                  "least two devices, simgpu and ", tensor.device(), "!");
      return tensor;
    }
    const int own = tensor.device().index();
    TORCH_CHECK(device < 0 || device == own, name, ": Expected all tensors to be on the same device, but found simgpu:",
                device, " and simgpu:", own);
    device = own;
    for (auto& [there, here] : arguments)
      if (there.is_same(tensor)) return here;
    before_kernel(device);
    arguments.emplace_back(tensor, host_view(tensor));
    return arguments.back().second;
  }

  // An out= variant may have given an argument another shape, or more memory.
  void update_arguments() {
    for (auto& [there, here] : arguments) {
      const Storage &mine = there.storage(), &its = here.storage();
      if (to_host_address(mine.data()) != its.data() || mine.nbytes() != its.nbytes()) {
        resize_storage(mine.unsafeGetStorageImpl(), its.nbytes());
        if (its.nbytes()) std::memcpy(to_host_address(mine.data()), its.data(), its.nbytes());
      }
      if (there.sizes() != here.sizes() || there.strides() != here.strides() ||
          there.storage_offset() != here.storage_offset())
        there.unsafeGetTensorImpl()->set_sizes_and_strides(here.sizes(), here.strides(), here.storage_offset());
    }
  }

  // An argument, a view of an argument, or a fresh tensor.
  Tensor out(const Tensor& result) {
    if (!result.defined() || on_device(result)) return result;
    for (auto& [there, here] : arguments)
      if (here.is_same(result)) return there;
    const void* data = result.storage().data();
    for (auto& [there, here] : arguments)
      if (data && here.storage().data() == data) return tensor_over(there.storage(), DispatchKey::PrivateUse1, result);
    Storage adopted(Storage::use_byte_size_t(), result.storage().nbytes(), Allocator::get()->adopt(result, device),
                    Allocator::get(), true);
    return tensor_over(std::move(adopted), DispatchKey::PrivateUse1, result);
  }
};

// Every operator without a kernel of its own below: the CPU's kernel, on the same bytes.
void run_cpu_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const std::set<std::string> indexing{"aten::index", "aten::index_put", "aten::index_put_",
                                              "aten::_index_put_impl_"};
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  Call call;
  call.name = toString(schema.operator_name());
  call.takes_host_tensors = indexing.count(schema.name()) > 0;
  call.takes_host_scalars = call.name.rfind("aten::_fused_", 0) != 0;
  kernel_count++;
  bool result_on_host = false;
  at::Generator generator;
  for (size_t i = 0; i < count; i++) {
    auto& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool written = alias && alias->isWrite();
    if (value.isTensor()) {
      value = call.in(value.toTensor(), written);
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(call.in(tensor, written));
      value = c10::List<Tensor>(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional<Tensor>(call.in(*tensor, written)) : tensor);
      value = list;
    } else if (value.isDevice()) {
      const Device device = value.toDevice();
      result_on_host = device.type() != kType;
      if (!result_on_host && call.device < 0) call.device = Guard::index(device);
      value = Device(kCPU);
    } else if (value.isGenerator()) {
      generator = value.toGenerator();
      TORCH_CHECK(generator.device().type() == kType, "Expected a 'simgpu' device type for generator but found '",
                  generator.device().type(), "'");
      value = IValue();
    }
  }
  if (call.device < 0) call.device = current_device;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    std::optional<Borrowed> borrowed;
    if (!generator.defined() && op.hasTag(at::Tag::nondeterministic_seeded)) generator = default_generator(call.device);
    if (generator.defined()) borrowed.emplace(generator);
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  }
  call.update_arguments();
  if (result_on_host) return;
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.out(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(call.out(tensor));
      value = c10::List<Tensor>(list);
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_cpu_kernel>()); }

// --- kernels that concern memory, and those that PyTorch has no CPU kernel for ------------------------------------------

Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
             std::optional<bool> pin, std::optional<MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(size, Allocator::get(), DispatchKeySet(DispatchKey::PrivateUse1),
                                   dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool> pin) {
  const c10::OptionalDeviceGuard guard(device);
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_strided_generic(size, stride, Allocator::get(), DispatchKeySet(DispatchKey::PrivateUse1),
                                           dtype_or_default(dtype));
}

// Derivatives that are zero everywhere, as of sgn: a tensor without memory, with a dispatch key of its own, as on CUDA.
Tensor efficient_zero_tensor(SymIntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>,
                             std::optional<Device> device, std::optional<bool>) {
  static auto* allocators = [] {
    auto* made = new std::vector<at::native::ZeroTensorAllocator*>;
    for (int i = 0; i < device_count(); i++) made->push_back(new at::native::ZeroTensorAllocator(Device(kType, i)));
    return made;
  }();
  const DispatchKeySet keys = DispatchKeySet(DispatchKey::PrivateUse1) | DispatchKeySet(DispatchKey::ZeroTensor);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), (*allocators)[Guard::index(*device)], keys,
                                   dtype_or_default(dtype), std::nullopt);
}

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, std::optional<SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

Tensor view(const Tensor& self, SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

const Tensor& resize_(const Tensor& self, SymIntArrayRef size, std::optional<MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  if (format && *format != MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t elements = impl->numel() ? impl->storage_offset() + impl->numel() : 0;
  const size_t needed = elements * self.dtype().itemsize();
  if (needed > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), needed);
  return self;
}

void copy_bytes(const Tensor& to, const Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView below;
  to.copy_(from);
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  const bool upload = !on_device(self), download = !on_device(to);
  const int device = (upload ? to : self).device().index();
  const Tensor target = host_view(to), source = host_view(self);
  kernel_count++;
  const void* host_memory = upload ? self.storage().data() : download ? to.storage().data() : nullptr;
  if (non_blocking && host_memory && PinnedAllocator::get()->holds(host_memory)) {
    // What the target held before is lost now, unless a copy before this one has yet to read it.
    if (target.is_contiguous() && !is_awaited(target.storage().data()))
      std::memset(target.data_ptr(), 0xff, target.nbytes());
    // The device's tensors live until the copy is done; the host's must be kept by the program, as on a GPU.
    defer(device, [target, source, self, to] { copy_bytes(target, source); }, source.storage().data());
    return to;
  }
  if (upload || download) sync_count++;
  before_kernel(device);
  if (!upload && !download && self.device() != to.device()) before_kernel(to.device().index());
  copy_bytes(target, source);
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

Scalar local_scalar(const Tensor& self) {
  sync_count++;
  before_kernel(self.device().index());
  return at::_local_scalar_dense(host_view(self));
}

Tensor& set_storage_at(Tensor& self, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::cpu::set_(self, storage, offset, size, stride);
}

Tensor& set_storage(Tensor& self, Storage storage) {
  const int64_t elements = storage.nbytes() / self.dtype().itemsize();
  return at::cpu::set_(self, storage, 0, {elements}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return self.set_(source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(Tensor&, Stream) {}  // deferred copies keep their tensors alive

// As between CPU and CUDA: Module.to() keeps its Parameter objects, and `tensor.data = ` takes another device's tensor.
bool has_compatible_shallow_copy_type(const Tensor&, const Tensor&) { return true; }

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups) {
  Call call;
  call.name = "convolution";
  kernel_count++;
  at::AutoDispatchBelowADInplaceOrView below;
  const Tensor x = call.in(input, true), w = call.in(weight, true);
  std::optional<Tensor> b;
  if (bias && bias->defined()) b = call.in(*bias, true);
  return call.out(at::convolution(x, w, b, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input,
                                                        const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
                                                        IntArrayRef dilation, bool transposed,
                                                        IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> mask) {
  Call call;
  call.name = "convolution_backward";
  kernel_count++;
  at::AutoDispatchBelowADInplaceOrView below;
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  const Tensor g = call.in(gradient, true), x = call.in(input, true), w = call.in(weight, true);
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      g, x, w, IntArrayRef{channels}, stride, padding, dilation, transposed, output_padding, groups, mask);
  return {call.out(of_input), call.out(of_weight), call.out(of_bias)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &efficient_zero_tensor);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("resize_", &resize_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}

// --- autocast, by CUDA's lists of operators -----------------------------------------------------------------------------

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_IF_UNSET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define FP32_APPENDED(...) KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE(__VA_ARGS__)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_IF_UNSET)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(FP32_APPENDED)
  AT_FORALL_PROMOTE(PROMOTE)
}

// --- collectives -----------------------------------------------------------------------------------------------------------

Tensor copy_to_host(const Tensor& tensor) {
  TORCH_CHECK(on_device(tensor), "simccl: tensors must be on the device, found ", tensor.device());
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "simccl: tensors must be contiguous");
  before_kernel(tensor.device().index());
  return host_view(tensor).contiguous().clone();
}

void copy_from_host(const Tensor& to, const Tensor& from) {
  before_kernel(to.device().index());
  const Tensor target = host_view(to);
  copy_bytes(target, from.view_as(target));
}

}  // namespace simgpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simgpu;
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(kType, simgpu::Allocator::get());
  m.def("device_count", &device_count);
  m.def("current_device", [] { return (int)current_device; });
  m.def("set_device", [](int index) { Guard().setDevice({kType, (DeviceIndex)index}); });
  m.def("default_generator", [](int index) { return default_generator(index); });
  m.def("counts", [] {
    return std::map<std::string, int64_t>{
        {"syncs", sync_count}, {"kernels", kernel_count}, {"deferred_copies", deferred_count}};
  });
  m.def("collectives", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<HostCollectives>("simccl", std::move(gloo), &copy_to_host, &copy_from_host);
  });
}
