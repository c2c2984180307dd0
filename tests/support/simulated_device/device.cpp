// A CUDA device whose memory is the host's, for torch's CPU wheel: eight devices, an allocator, pinned memory, and every
// operator computed by its CPU kernel on the same bytes. Kernels run at once; who has to wait for whom is followed in
// Python (streams.py). Tensors say `cuda:0`, and to mix them with tensors of the host fails as it does on a GPU.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/set_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <cstring>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

namespace {
constexpr c10::DeviceIndex kDevices = 8;
thread_local c10::DeviceIndex current = 0;

// ── memory ────────────────────────────────────────────────────────────────────────────────────────

struct Block {  // of the host's memory, behind a pointer that belongs to a device, or is pinned
  c10::DataPtr memory;
  bool pinned;
};
std::mutex guard;
std::set<std::pair<const char*, const char*>> pinned;  // first byte and the one behind the last
std::vector<const void*> freed;                        // memory that was given up, until somebody asks
size_t held = 0;
std::unordered_map<const void*, size_t> sizes;

void give_up(void* context) {
  auto* block = static_cast<Block*>(context);
  const char* start = static_cast<const char*>(block->memory.get());
  {
    std::lock_guard<std::mutex> lock(guard);
    freed.push_back(start);
    if (block->pinned) {
      pinned.erase(pinned.lower_bound({start, nullptr}));
    } else {
      held -= sizes[start];
      sizes.erase(start);
    }
  }
  delete block;
}

struct Memory final : c10::Allocator {
  explicit Memory(bool of_host) : of_host(of_host) {}
  c10::DataPtr allocate(size_t bytes) override {
    // One byte at least: who holds what is told by addresses. 0xFF makes NaN of whatever is read before it is written.
    auto* block = new Block{c10::GetCPUAllocator()->allocate(bytes + 1), of_host};
    auto* start = static_cast<char*>(block->memory.get());
    std::memset(start, 0xFF, bytes);
    std::lock_guard<std::mutex> lock(guard);
    if (of_host) {
      pinned.insert({start, start + bytes + 1});
    } else {
      held += bytes;
      sizes[start] = bytes;
    }
    auto device = of_host ? c10::Device(c10::kCPU) : c10::Device(c10::kCUDA, current);
    return {start, block, &give_up, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool of_host;
};
Memory device_memory(false), pinned_memory(true);

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(guard);
  auto next = pinned.upper_bound({static_cast<const char*>(data), reinterpret_cast<const char*>(UINTPTR_MAX)});
  return next != pinned.begin() && static_cast<const char*>(data) < std::prev(next)->second;
}

struct Mapping {  // of memory that several processes share, as CUDA IPC has it
  void* start;
  size_t bytes;
  int file;
  bool owned;  // then whoever still reads it, when it is given up, reads NaN
};
void unmap(void* context) {
  auto* mapping = static_cast<Mapping*>(context);
  if (mapping->owned) std::memset(mapping->start, 0xFF, mapping->bytes);
  {
    std::lock_guard<std::mutex> lock(guard);
    freed.push_back(mapping->start);
  }
  munmap(mapping->start, mapping->bytes);
  close(mapping->file);
  delete mapping;
}

// ── what torch asks of a device ───────────────────────────────────────────────────────────────────

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device getDevice() const override { return Device(c10::kCUDA, current); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override { current = device.has_index() ? device.index() : current; }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
Guard the_guard;
c10::impl::DeviceGuardImplRegistrar registered(c10::kCUDA, &the_guard);

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
};

// ── every operator, by its CPU kernel ─────────────────────────────────────────────────────────────

// Operators that take tensors of the host beside those of a device: copies, and indices that are then copied.
const std::set<std::string> kMixed = {"aten::copy_", "aten::index", "aten::index_put_", "aten::_index_put_impl_"};
// A kernel for a GPU reads these by itself: not even a number may lie on the host.
const std::set<std::string> kStrict = {"aten::_fused_adamw_", "aten::_fused_adam_", "aten::index_select",
                                       "aten::gather", "aten::index_copy_", "aten::embedding"};

c10::DataPtr sharing(const c10::Storage& storage, c10::Device device) {
  auto* keep = new c10::Storage(storage);
  return {storage.mutable_data(), keep, [](void* kept) { delete static_cast<c10::Storage*>(kept); }, device};
}

at::Tensor like(const at::Tensor& tensor, const c10::Storage& storage, c10::DispatchKeySet keys, bool view = false) {
  auto made = view ? at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(storage), keys,
                                                              tensor.dtype())
                   : at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : op(op), name(op.schema().name()) {}

  void run(torch::jit::Stack* stack) {
    size_t given = op.schema().arguments().size(), first = stack->size() - given;
    for (size_t i = first; i < stack->size(); ++i) look((*stack)[i]);
    TORCH_CHECK(device.is_cuda() || !on_host, name, ": no device");
    TORCH_CHECK(!device.is_cuda() || !on_host || kMixed.count(name),
                "Expected all tensors to be on the same device, but found at least two devices, ", device,
                " and cpu! (", name, ")");
    for (size_t i = first; i < stack->size(); ++i) (*stack)[i] = to_host((*stack)[i]);
    op.callBoxed(stack);
    for (auto& [host, own] : tensors) resized(host, own);
    for (auto& value : *stack) value = to_device(value);
  }

 private:
  void look(const c10::IValue& value) {
    if (value.isTensor()) {
      look_at(value.toTensor());
    } else if (value.isList()) {
      for (const c10::IValue& each : value.toListRef()) look(each);
    } else if (value.isDevice()) {
      device = value.toDevice();
    }
  }
  void look_at(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (!tensor.is_cuda()) {
      on_host |= tensor.dim() > 0 || kStrict.count(name);
      return;
    }
    TORCH_CHECK(!device.is_cuda() || !device.has_index() || device == tensor.device() || name == "aten::copy_",
                "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ",
                tensor.device(), "! (", name, ")");
    device = tensor.device();
  }

  c10::IValue to_host(const c10::IValue& value) {
    if (value.isTensor()) return on_cpu(value.toTensor());
    if (value.isDevice()) return c10::Device(c10::kCPU);
    if (!value.isList()) return value;
    return mapped(value, [this](const c10::IValue& each) { return to_host(each); });
  }
  c10::IValue to_device(const c10::IValue& value) {
    if (value.isTensor()) return on_cuda(value.toTensor());
    if (!value.isList()) return value;
    return mapped(value, [this](const c10::IValue& each) { return to_device(each); });
  }
  template <class Map>
  static c10::IValue mapped(const c10::IValue& value, Map map) {
    c10::impl::GenericList found(value.toList().elementType());
    for (const c10::IValue& each : value.toListRef()) found.push_back(map(each));
    return found;
  }

  at::Tensor on_cpu(const at::Tensor& own) {
    if (!own.defined() || !own.is_cuda()) return own;
    auto& storage = storages[own.storage().unsafeGetStorageImpl()];
    if (!storage) {
      storage = c10::Storage(c10::Storage::use_byte_size_t(), own.storage().nbytes(),
                             sharing(own.storage(), c10::kCPU), c10::GetCPUAllocator(), true);
      originals.emplace(storage.unsafeGetStorageImpl(), own);
    }
    auto host = like(own, storage, c10::DispatchKeySet(c10::DispatchKey::CPU));
    tensors.emplace_back(host, own);
    return host;
  }
  void resized(const at::Tensor& host, const at::Tensor& own) {  // outputs grow as they are needed
    if (host.sizes() == own.sizes()) return;
    auto* impl = own.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(of_device(host));
    impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }
  c10::Storage of_device(const at::Tensor& host) {
    size_t bytes = host.storage().nbytes();
    auto memory = device_memory.allocate(bytes);
    if (bytes) std::memcpy(memory.get(), host.storage().data(), bytes);
    memory.unsafe_set_device(device);
    return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory), &device_memory, true);
  }
  at::Tensor on_cuda(const at::Tensor& host) {
    if (!host.defined() || host.is_cuda()) return host;
    for (auto& [known, own] : tensors) {
      if (known.is_same(host)) return own;
    }
    if (!device.is_cuda()) return host;
    if (name == "aten::copy_") return host;  // to the host: what it returns is the host's
    auto known = originals.find(host.storage().unsafeGetStorageImpl());
    if (known != originals.end()) return like(host, known->second.storage(), known->second.key_set(), true);
    return like(host, of_device(host), c10::DispatchKeySet(c10::DispatchKey::CUDA));
  }

  const c10::OperatorHandle& op;
  const std::string name;
  c10::Device device = c10::kCPU;
  bool on_host = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;  // of the host, and whose bytes they are
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages;  // of the device's, the same memory as the host's
  std::unordered_map<c10::StorageImpl*, at::Tensor> originals;   // and back: a tensor of it
};

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op).run(stack); }

c10::Device placed(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(c10::kCUDA, current);
}
at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard on(placed(device));
  auto type = dtype.value_or(c10::typeMetaToScalarType(at::get_default_dtype()));
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), type, format);
}
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard on(placed(device));
  auto type = dtype.value_or(c10::typeMetaToScalarType(at::get_default_dtype()));
  return at::detail::empty_strided_generic(size, stride, &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), type);
}
at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, std::move(storage), offset, size, stride);
}

at::Tensor on_host(const at::Tensor& own) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), own.storage().nbytes(), sharing(own.storage(), c10::kCPU),
                       c10::GetCPUAllocator(), true);
  return like(own, storage, c10::DispatchKeySet(c10::DispatchKey::CPU));
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  auto elements = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return at::native::set_storage_cpu_(tensor, std::move(storage), 0, {elements}, {1});
}

const std::set<std::string> kOwn = {"aten::empty.memory_format", "aten::empty_strided", "aten::set_.source_Tensor",
                                    "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset"};

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  // They would choose among kernels of a GPU; `copy_` among its queues.
  for (auto name : {"copy_", "convolution", "convolution_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
  }
  // What the CPU has a kernel for is computed by it, though it could also be put together from other operators.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (name.name.rfind("aten::", 0) == 0 && op && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) && !kOwn.count(full)) {
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
    }
  }
}
// The ranks' messages are gloo's, of the same bytes.
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
} silent;  // torch has kernels here, for the NCCL that it was not built with
c10::WarningUtils::WarningHandlerGuard quiet(&silent);
TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (name.name.rfind("c10d::", 0) == 0 && op && op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
      m.impl(name.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
    }
  }
}
TORCH_LIBRARY(simulated, m) { m.def("on_host(Tensor own) -> Tensor"); }
TORCH_LIBRARY_IMPL(simulated, CUDA, m) { m.impl("on_host", &on_host); }
struct Allocators {
  Allocators() { c10::SetAllocator(c10::kCUDA, &device_memory, 255); }
} allocators;
}  // namespace

namespace at {
using Simulated = ::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Simulated)
}  // namespace at

extern "C" {  // for ctypes
size_t held_bytes() { return held; }
int current_device() { return current; }
void set_device(int device) { current = static_cast<c10::DeviceIndex>(device); }
void resize_storage(void* storage, size_t bytes) {
  auto* impl = static_cast<c10::StorageImpl*>(storage);
  c10::DeviceGuard on(impl->device());
  at::native::resize_bytes_cpu(impl, bytes);
}
void share_storage(void* storage, int file, bool owned) {  // have its bytes in a file; an owner's are moved there
  auto* impl = static_cast<c10::StorageImpl*>(storage);
  auto* mapping = new Mapping{nullptr, impl->nbytes(), file, owned};
  mapping->start = mmap(nullptr, impl->nbytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (owned) std::memcpy(mapping->start, impl->data(), impl->nbytes());
  impl->set_data_ptr(c10::DataPtr(mapping->start, mapping, &unmap, impl->device()));
}
size_t take_freed(const void** found, size_t most) {
  std::lock_guard<std::mutex> lock(guard);
  size_t count = std::min(most, freed.size());
  std::copy(freed.end() - count, freed.end(), found);
  freed.resize(freed.size() - count);
  return count;
}
}
