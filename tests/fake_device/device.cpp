// A GPU in host memory: PyTorch's PrivateUse1 backend, computed by the CPU's kernels, with CUDA's rules of placement and
// autocast. What CUDA refuses is refused here by an exception, and so is a copy between two devices, which CUDA allows and no
// rank may make. Each of the two devices counts its bytes and can be limited.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/SDPBackend.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "autocast_lists.h"

#include <array>
#include <atomic>
#include <set>

namespace {

using at::Tensor;
constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;

thread_local int current = 0;  // as on CUDA: the current device belongs to the thread, and a new thread begins with 0

// --- memory ---------------------------------------------------------------------------------------------------------------

struct Memory {
  std::atomic<int64_t> allocated{0}, peak{0}, limit{0};
};
std::array<Memory, DEVICES> memories;

struct Block {  // in front of what is allocated
  int64_t device, size;
};
constexpr size_t HEAD = 64;

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device here(DEVICE, current);
    if (size == 0) return {nullptr, nullptr, [](void*) {}, here};
    auto& memory = memories[current];
    const int64_t wanted = size, limit = memory.limit;
    TORCH_CHECK_WITH(OutOfMemoryError, !limit || memory.allocated + wanted <= limit, "out of memory: ", memory.allocated.load(),
                     " + ", wanted, " of ", limit, " bytes");
    auto* block = static_cast<Block*>(aligned_alloc(HEAD, (size + 2 * HEAD - 1) / HEAD * HEAD));
    *block = {current, wanted};
    const int64_t now = memory.allocated += wanted;
    int64_t peak = memory.peak;
    while (now > peak && !memory.peak.compare_exchange_weak(peak, now)) {
    }
    void* data = reinterpret_cast<char*>(block) + HEAD;
    return {data, data, &release, here};
  }
  static void release(void* data) {
    auto* block = reinterpret_cast<Block*>(static_cast<char*>(data) - HEAD);
    memories[block->device].allocated -= block->size;
    free(block);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
Allocator allocator;
REGISTER_ALLOCATOR(DEVICE, &allocator)

// --- the current device, and what PyTorch asks of a backend -----------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = DEVICE;
  explicit Guard(c10::DeviceType = DEVICE) {}
  c10::DeviceType type() const override { return DEVICE; }
  c10::Device getDevice() const override { return {DEVICE, static_cast<c10::DeviceIndex>(current)}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = std::max<int>(device.index(), 0); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  at::Device getDeviceFromPtr(void* data) const override {
    const auto* block = reinterpret_cast<Block*>(static_cast<char*>(data) - HEAD);
    return {DEVICE, static_cast<c10::DeviceIndex>(block->device)};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto fresh = allocator.allocate(size);
    if (storage.data() && fresh.get()) memcpy(fresh.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};
[[maybe_unused]] const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// --- CUDA's rules of placement ------------------------------------------------------------------------------------------------

// Elementwise operations, in which a CPU tensor without dimensions may take part.
bool is_elementwise(const std::string& name) {
  static const std::set<std::string> known = {
      "add",         "addcdiv",     "addcmul",     "atan2",       "bitwise_and",  "bitwise_or", "clamp",        "clamp_max",
      "clamp_min",   "copysign",    "div",         "eq",          "fill",         "floor_divide", "fmax",       "fmin",
      "fmod",        "ge",          "gt",          "heaviside",   "hypot",        "le",         "lerp",         "logical_and",
      "logical_or",  "logical_xor", "lt",          "masked_fill", "maximum",      "minimum",    "mul",          "ne",
      "pow",         "remainder",   "rsub",        "sub",         "where",        "xlogy",      "_foreach_add", "_foreach_div",
      "_foreach_mul"};
  auto base = name.substr(name.find("::") + 2);
  while (!base.empty() && base.back() == '_') base.pop_back();
  return known.count(base) > 0;
}

std::vector<Tensor> tensors_of(const c10::IValue& value) {
  std::vector<Tensor> found;
  if (value.isTensor()) found.push_back(value.toTensor());
  if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorList()) found.push_back(tensor);
  }
  if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor> tensor : value.toOptionalTensorList()) found.push_back(tensor.value_or(Tensor()));
  }
  return found;
}

// Throws where CUDA would: for tensors of two devices, or another device's generator.
void check(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  const auto& name = schema.name();
  const auto values = torch::jit::last(stack, schema.arguments().size());
  std::optional<c10::Device> device;
  for (const auto& value : values) {
    for (const auto& tensor : tensors_of(value)) {
      if (!device && tensor.defined() && tensor.device().type() == DEVICE) device = tensor.device();
    }
  }
  if (!device) return;
  for (size_t i = 0; i < values.size(); i++) {
    const auto& argument = schema.arguments()[i].name();
    if (values[i].isGenerator())
      TORCH_CHECK(values[i].toGenerator().device().type() == DEVICE, name, ": expected a generator of ", *device, ", got one of ",
                  values[i].toGenerator().device());
    for (const auto& tensor : tensors_of(values[i])) {
      if (!tensor.defined() || tensor.device() == *device) continue;
      const bool on_cpu = tensor.is_cpu(), number = on_cpu && tensor.unsafeGetTensorImpl()->is_wrapped_number();
      if (number || (on_cpu && tensor.dim() == 0 && is_elementwise(name))) continue;
      if (on_cpu && argument == "indices") continue;  // the operation copies them
      TORCH_CHECK(false, name, ": expected all tensors to be on the same device, but '", argument, "' is on ", tensor.device(),
                  " and another is on ", *device);
    }
  }
}

// --- what costs a GPU time ----------------------------------------------------------------------------------------------------

thread_local int64_t waits = 0;       // of this thread, for a number, a size or a copy to the host
thread_local int64_t uploads = 0;     // copies from the host by this thread, all of pageable memory: nothing here is pinned
thread_local bool computing = false;  // the CPU stands for the device, so its copies are none

bool is_mask(const Tensor& tensor) { return tensor.defined() && (tensor.dtype() == at::kBool || tensor.dtype() == at::kByte); }

// Whether the size of the result, or the result itself, is read from the device.
bool waits_for(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  static const std::set<std::string> known = {"equal", "masked_select", "nonzero", "repeat_interleave", "_unique", "_unique2"};
  if (known.count(schema.name().substr(schema.name().find("::") + 2))) return true;
  const auto values = torch::jit::last(stack, schema.arguments().size());
  for (size_t i = 0; i < values.size(); i++) {
    if (schema.arguments()[i].name() != "indices") continue;
    for (const auto& tensor : tensors_of(values[i])) {
      if (is_mask(tensor)) return true;
    }
  }
  return false;
}

using Op = c10::OperatorHandle;
using Stack = torch::jit::Stack;

void compute(const Op& op, Stack* stack) {
  const bool before = std::exchange(computing, true);
  struct Restore {
    bool before;
    ~Restore() { computing = before; }
  } restore{before};
  at::native::cpu_fallback(op, stack);
}

void compute_on_cpu(const Op& op, Stack* stack) {
  check(op.schema(), *stack);
  waits += waits_for(op.schema(), *stack);
  compute(op, stack);
}

// --- tensors that are made, viewed, copied and read ---------------------------------------------------------------------------

// A GPU computes in float64 at a 32nd or 64th of its speed. Embeddings of positions are small enough, rows of pictures are not.
void check_float64(std::optional<at::ScalarType> dtype, at::IntArrayRef size) {
  TORCH_CHECK(c10::dtype_or_default(dtype) != at::kDouble || c10::multiply_integers(size) <= 1000, "a float64 tensor of ", size);
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  check_float64(dtype, C10_AS_INTARRAYREF_SLOW(size));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  check_float64(dtype, C10_AS_INTARRAYREF_SLOW(size));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator, keys,
                                           c10::dtype_or_default(dtype));
}

// The same memory, seen from the CPU.
Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return tensor;
  const auto& storage = tensor.storage();
  const int64_t entries = storage.nbytes() / tensor.itemsize();
  const Tensor seen = at::from_blob(storage.mutable_data(), {entries}, at::TensorOptions().dtype(tensor.dtype()))
                          .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  seen._set_conj(tensor.is_conj());
  return seen;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (!computing) (from.is_cpu() ? uploads : waits) += from.is_cpu() || to.is_cpu();
  TORCH_CHECK(from.is_cpu() || to.is_cpu() || from.device() == to.device(), "a copy from ", from.device(), " to ", to.device(),
              ": a rank has no business on another's device");
  if (from.numel() > 0) on_cpu(to).copy_(on_cpu(from).expand(to.sizes()));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Tensor on_device(const Tensor& cpu, c10::Device device) {
  if (!cpu.defined()) return cpu;
  const auto made = at::empty_strided(cpu.sizes(), cpu.strides(), cpu.options().device(device));
  on_cpu(made).copy_(cpu);
  return made;
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  waits += !computing;
  return on_cpu(tensor).item();
}

// For what changes no number: shapes, strides and storages.
void as_on_cpu(const Op& op, Stack* stack) { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack); }

// --- what CUDA computes in one kernel ----------------------------------------------------------------------------------------

void same_device(const char* name, const Tensor& one, const Tensor& other) {
  TORCH_CHECK(!other.defined() || one.device() == other.device(), name, ": expected all tensors to be on the same device, but found ",
              one.device(), " and ", other.device());
}

Op named(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

// CUDA's convolutions take the layout of their weights, its group norms separate channels: others are copied first.
void copied(Stack* stack, size_t place, size_t count, at::MemoryFormat format) {
  auto& value = torch::jit::peek(*stack, place, count);
  value = value.toTensor().contiguous(format);
}

void group_norm(const Op& op, Stack* stack) {
  copied(stack, 0, op.schema().arguments().size(), at::MemoryFormat::Contiguous);
  compute_on_cpu(op, stack);
}

void convolution(const Op& op, Stack* stack) {
  const auto weight = torch::jit::peek(*stack, 1, op.schema().arguments().size()).toTensor();
  if (weight.dim() == 4 && weight.is_contiguous(at::MemoryFormat::ChannelsLast))
    copied(stack, 0, op.schema().arguments().size(), at::MemoryFormat::ChannelsLast);
  check(op.schema(), *stack);
  compute(named("aten::convolution"), stack);
}

void convolution_backward(const Op& op, Stack* stack) {
  check(op.schema(), *stack);
  const auto weight = torch::jit::peek(*stack, 2, 10).toTensor();
  stack->insert(stack->end() - 7, std::vector<int64_t>{weight.size(0)});  // the size of the bias
  compute(named("aten::convolution_backward"), stack);
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& input, at::IntArrayRef shape, const Tensor& scale,
                                             const std::optional<Tensor>& weight, std::array<bool, 2> wanted) {
  same_device("rms_norm_backward", input, grad);
  const auto first = input.dim() - static_cast<int64_t>(shape.size());
  const auto x = on_cpu(input).to(at::kFloat), g = on_cpu(grad).to(at::kFloat);
  const auto normed = x.flatten(first).mul(on_cpu(scale));
  const auto weighted = (weight && weight->defined() ? g.mul(on_cpu(*weight)) : g).flatten(first);
  const auto along = weighted.mul(normed).mean(-1, true);
  const auto back = weighted.sub(normed.mul(along)).mul(on_cpu(scale));
  Tensor to_weight;
  if (wanted[1] && weight)
    to_weight = on_device(g.mul(normed.reshape(x.sizes())).sum_to_size(shape).to(weight->scalar_type()), input.device());
  return {on_device(back.reshape(x.sizes()).to(input.scalar_type()), input.device()), to_weight};
}

using MaybeTensor = std::optional<Tensor>;
MaybeTensor on_cpu(const MaybeTensor& tensor) { return tensor ? MaybeTensor(on_cpu(*tensor)) : tensor; }

// Flash attention where the CPU has it for these shapes, else products and a softmax.
int64_t attention_kind(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& mask, double dropout,
                       bool causal, std::optional<double> scale, bool grouped) {
  const auto kind = at::_fused_sdp_choice(on_cpu(query), on_cpu(key), on_cpu(value), on_cpu(mask), dropout, causal, scale, grouped);
  const bool flash = kind == static_cast<int64_t>(at::SDPBackend::flash_attention);
  return static_cast<int64_t>(flash ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

using Attention = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;
Attention attention(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& bias, double dropout, bool causal,
                    bool, std::optional<double> scale) {
  for (const auto& other : {key, value, bias.value_or(Tensor())}) same_device("scaled_dot_product_attention", query, other);
  const auto [out, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(on_cpu(query), on_cpu(key), on_cpu(value), dropout,
                                                                                causal, on_cpu(bias), scale);
  const auto device = query.device();
  const auto none = at::empty({0}, query.options());
  return {on_device(out, device), on_device(logsumexp, device), none, none, query.sym_size(2), key.sym_size(2), none, none, none};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                              const Tensor& value, const Tensor& bias, std::array<bool, 4>,
                                                              const Tensor& out, const Tensor& logsumexp, const Tensor&, const Tensor&,
                                                              c10::SymInt, c10::SymInt, double dropout, bool causal, const Tensor&,
                                                              const Tensor&, std::optional<double> scale) {
  same_device("scaled_dot_product_attention_backward", query, grad);
  const auto mask = bias.defined() ? MaybeTensor(on_cpu(bias)) : std::nullopt;
  const auto [to_query, to_key, to_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      on_cpu(grad), on_cpu(query), on_cpu(key), on_cpu(value), on_cpu(out), on_cpu(logsumexp), dropout, causal, mask, scale);
  const auto device = query.device();
  return {on_device(to_query, device), on_device(to_key, device), on_device(to_value, device), Tensor()};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  for (auto name : {"set_.source_Storage_storage_offset", "set_.source_Storage", "resize_", "view", "_reshape_alias", "as_strided",
                    "unfold", "view_as_real", "view_as_complex"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&as_on_cpu>());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("_fused_rms_norm_backward", &rms_norm_backward);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&group_norm>());
  for (auto name : {"_fused_rms_norm", "native_group_norm_backward", "native_layer_norm", "native_layer_norm_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
}

// A copy resolves a conjugate, so what torch does before all other operations would have no end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// --- meetings of ranks, by gloo, which works on the memory itself -------------------------------------------------------------

void meet_on_cpu(const Op& op, Stack* stack) {
  for (auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (!value.isTensorList()) continue;
    std::vector<Tensor> seen;
    for (const Tensor& tensor : value.toTensorList()) seen.push_back(on_cpu(tensor));
    const_cast<c10::IValue&>(value) = seen;
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}
TORCH_LIBRARY_IMPL(c10d, PrivateUse1, m) { m.impl("allreduce_", torch::CppFunction::makeFromBoxedFunction<&meet_on_cpu>()); }

// --- CUDA's autocast, by its own lists ---------------------------------------------------------------------------------------

}  // namespace
namespace at::autocast {  // ATen/autocast_mode.h takes longer to compile than all of this file
TORCH_API Tensor cached_cast(ScalarType, const Tensor&, c10::DeviceType);
TORCH_API ScalarType get_autocast_dtype(c10::DeviceType);
}  // namespace at::autocast
namespace {

bool is_eligible(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == DEVICE && tensor.is_floating_point() && tensor.dtype() != at::kDouble;
}

enum class Policy { LOWER, FLOAT32, FLOAT32_RESULT, WIDEST };

template <Policy POLICY>
void autocast(const Op& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto& arguments = op.schema().arguments();
  const auto given = [&](size_t i) -> c10::IValue& { return torch::jit::peek(*stack, i, arguments.size()); };
  auto dtype = POLICY == Policy::FLOAT32 ? at::kFloat : at::autocast::get_autocast_dtype(DEVICE);
  for (size_t i = 0; i < arguments.size(); i++) {
    if (POLICY == Policy::FLOAT32_RESULT) {
      if (arguments[i].name() == "dtype" && given(i).isNone() && is_eligible(given(0).toTensor())) given(i) = at::kFloat;
    } else if (POLICY == Policy::WIDEST) {
      for (const Tensor& tensor : tensors_of(given(i))) {
        if (is_eligible(tensor) && tensor.dtype() == at::kFloat) dtype = at::kFloat;
      }
    }
  }
  for (size_t i = 0; i < arguments.size() && POLICY != Policy::FLOAT32_RESULT; i++) {
    if (given(i).isTensor()) given(i) = at::autocast::cached_cast(dtype, given(i).toTensor(), DEVICE);
    if (given(i).isTensorList()) {
      auto cast = tensors_of(given(i));
      for (auto& tensor : cast) tensor = at::autocast::cached_cast(dtype, tensor, DEVICE);
      given(i) = cast;
    }
  }
  op.callBoxed(*stack);
}

// "_convolution, deprecated" is written "_convolution.deprecated".
std::string overload(std::string name) {
  const auto comma = name.find(", ");
  return comma == std::string::npos ? name : name.replace(comma, 2, ".");
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define AS_TEXT(...) #__VA_ARGS__,
#define AUTOCAST(LIST, POLICY) \
  for (const std::string name : {LIST(AS_TEXT)}) m.impl(overload(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&autocast<POLICY>>());
  AUTOCAST(AT_FORALL_LOWER_PRECISION_FP, Policy::LOWER)
  AUTOCAST(AT_FORALL_FP32, Policy::FLOAT32)
  AUTOCAST(AT_FORALL_FP32_SET_OPT_DTYPE, Policy::FLOAT32_RESULT)
  AUTOCAST(AT_FORALL_PROMOTE, Policy::WIDEST)
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// --- for Python ---------------------------------------------------------------------------------------------------------------

TORCH_LIBRARY(fake_device, m) {
  m.def("current_device", []() -> int64_t { return current; });
  m.def("set_device", [](int64_t index) { current = index; });
  m.def("device_count", []() -> int64_t { return DEVICES; });
  m.def("allocated", [](int64_t index) -> int64_t { return memories[index].allocated; });
  m.def("peak", [](int64_t index) -> int64_t { return memories[index].peak; });
  m.def("reset_peak", [](int64_t index) { memories[index].peak = memories[index].allocated.load(); });
  m.def("waits", []() -> int64_t { return waits; });
  m.def("uploads", []() -> int64_t { return uploads; });
  m.def("limit", [](int64_t index, int64_t bytes) { memories[index].limit = bytes; });
}

}  // namespace

namespace at::native {  // as in ATen/native/transformers/attention.h, whose includes take seconds
using ChooseAttention = int64_t (*)(const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, double, bool, std::optional<double>,
                                    bool);
DECLARE_DISPATCH(ChooseAttention, _fused_sdp_choice_stub)
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_kind)
}
