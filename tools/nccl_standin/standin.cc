// SPDX-License-Identifier: Apache-2.0
// A stand-in for CUDA's runtime, NCCL and Horovod's CUDA kernels, as far as edl uses them, on the CPU.
//
// A stream is a thread with a queue, device memory is the host's, ranks meet in shared memory. A dead rank is silent,
// as over NVLink, and an aborted sum leaves garbage. The stand-in aborts the process when a communicator is used after
// its end. An abort takes half a second, and a destroy waits until all ranks have finalized.
//
// A file PID.ORDER in the folder $NCCL_STANDIN_ORDERS makes one operation of that process fail or hang. The stand-in
// removes the file when it obeys.
//
//   init      the initialization of a communicator fails
//   connect   the initialization of a communicator never ends
//   call      the call of a collective fails
//   hang      the call of a collective stays in progress
//   async     a later query for asynchronous errors finds one
//   finalize  the finalization of a communicator never ends
//   destroy   the destruction of a communicator never ends
//
// It appends a line to PID.ended in that folder when a communicator ends: `aborted` or `destroyed`.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "horovod/common/half.h"
#include "horovod/common/ops/cuda/cuda_kernels.h"

static void sleep_microseconds(int n) { std::this_thread::sleep_for(std::chrono::microseconds(n)); }

[[noreturn]] static void fatal(const char* what) {
  fprintf(stderr, "nccl_standin: %s\n", what);
  ::abort();
}

// --- CUDA's runtime

struct CUstream_st {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  std::thread thread;

  CUstream_st() : thread([this] { run(); }) {}

  void put(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex);
    queue.push_back(std::move(task));
    changed.notify_one();
  }

  void run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return !queue.empty(); });
        task = queue.front();
        queue.pop_front();
      }
      task();
    }
  }
};

struct CUevent_st {
  std::mutex mutex;
  std::condition_variable changed;
  int recorded = 0, reached = 0;  // numbers of cudaEventRecord calls
};

static thread_local int device;

extern "C" {
cudaError_t cudaGetDevice(int* out) {
  *out = device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int number) {
  device = number;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* out) {
  *out = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int) {
  *out = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  stream->put([&] {
    std::lock_guard<std::mutex> lock(mutex);
    done = true;
    changed.notify_one();
  });
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return done; });
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
  *out = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  int number;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    number = ++event->recorded;
  }
  stream->put([event, number] {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->reached = number;
    event->changed.notify_all();
  });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  std::lock_guard<std::mutex> lock(event->mutex);
  return event->reached == event->recorded ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  std::unique_lock<std::mutex> lock(event->mutex);
  event->changed.wait(lock, [event] { return event->reached == event->recorded; });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  stream->put([=] { memcpy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  stream->put([=] { memset(to, value, bytes); });
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaFree(void*) { return cudaSuccess; }
cudaError_t cudaMalloc(void** out, size_t bytes) {
  *out = malloc(bytes);
  return cudaSuccess;
}
}

// --- Horovod's CUDA kernels (horovod/common/ops/cuda/cuda_kernels.cu)

// A float16, which not every compiler has.
struct Half {
  unsigned short bits;

  Half(float value) { horovod::common::Float2HalfBits(&value, &bits); }
  operator float() const {
    float value;
    horovod::common::HalfBits2Float(&bits, &value);
    return value;
  }
  void operator+=(Half other) { *this = Half(float(*this) + float(other)); }
};

template <class T>
static void scale(const void* in, void* out, size_t bytes, double factor) {
  for (size_t i = 0; i < bytes / sizeof(T); ++i) ((T*)out)[i] = T(((const T*)in)[i] * factor);
}

namespace horovod {
namespace common {
static void scale(DataType type, const void* in, void* out, size_t bytes, double factor) {
  switch (type) {
    case HOROVOD_UINT8:
      return ::scale<uint8_t>(in, out, bytes, factor);
    case HOROVOD_INT8:
      return ::scale<int8_t>(in, out, bytes, factor);
    case HOROVOD_INT32:
      return ::scale<int32_t>(in, out, bytes, factor);
    case HOROVOD_INT64:
      return ::scale<int64_t>(in, out, bytes, factor);
    case HOROVOD_FLOAT16:
      return ::scale<Half>(in, out, bytes, factor);
    case HOROVOD_FLOAT32:
      return ::scale<float>(in, out, bytes, factor);
    case HOROVOD_FLOAT64:
      return ::scale<double>(in, out, bytes, factor);
    default:
      fatal("a scaled copy of an unknown type");
  }
}

void BatchedD2DMemcpyCudaImpl(BatchedD2DParams& params, int num_copies, cudaStream_t stream) {
  stream->put([params, num_copies] {
    for (int i = 0; i < num_copies; ++i) memcpy(params.out[i], params.in[i], params.sizes[i]);
  });
}
void BatchedScaledD2DMemcpyCudaImpl(BatchedD2DParams& params, int num_copies, double scale_factor, DataType dtype,
                                    cudaStream_t stream) {
  stream->put([=] {
    for (int i = 0; i < num_copies; ++i) scale(dtype, params.in[i], params.out[i], params.sizes[i], scale_factor);
  });
}

// What Horovod links but edl does not use: a factor of a single sum.
void ScaleBufferCudaImpl(const void*, void*, const int64_t, double, DataType, cudaStream_t) {
  fatal("ScaleBufferCudaImpl");
}
}  // namespace common
}  // namespace horovod

// --- NCCL

static const size_t SLOT_BYTES = 4 << 20;
static const int MAX_RANKS = 16;

struct SharedMemory {
  std::atomic<int> arrived;              // ranks whose initialization has come here
  std::atomic<int> finalized;            // ranks
  std::atomic<long> barrier[MAX_RANKS];  // the last barrier that each rank has entered
  char slots[MAX_RANKS][SLOT_BYTES];
};

struct ncclComm {
  int rank, size;
  std::string name;  // of the shared memory
  SharedMemory* shared = nullptr;
  long barriers = 0;
  std::atomic<int> state{ncclInProgress};  // an ncclResult_t
  std::atomic<bool> aborted{false};
  std::atomic<int> running{0};  // collectives that are on a stream
  bool dead = false;
  bool finalizing = false;
  std::thread thread;  // of the initialization, then of a call

  // Wait for all ranks; false if the communicator is aborted meanwhile.
  bool barrier() {
    shared->barrier[rank] = ++barriers;
    for (int r = 0; r < size; ++r) {
      while (shared->barrier[r] < barriers) {
        if (aborted) return false;
        sleep_microseconds(20);
      }
    }
    return true;
  }
};

// The path of a file of this process; empty without the folder.
static std::string file_of_process(const char* suffix) {
  const char* folder = getenv("NCCL_STANDIN_ORDERS");
  return folder ? std::string(folder) + "/" + std::to_string(getpid()) + "." + suffix : "";
}

// True, once, if there is a file of this order.
static bool ordered(const char* order) {
  auto path = file_of_process(order);
  if (path.empty() || unlink(path.c_str())) return false;
  fprintf(stderr, "nccl_standin: obeys %s\n", order);
  return true;
}

static void note_end(const char* how) {
  if (FILE* file = fopen(file_of_process("ended").c_str(), "a")) {
    fprintf(file, "%s\n", how);
    fclose(file);
  }
}

static size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
      return 2;
    case ncclInt32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}

template <class T>
static void add_slots(const SharedMemory* shared, int ranks, char* out, size_t bytes) {
  for (size_t i = 0; i < bytes / sizeof(T); ++i) {
    T total = ((const T*)shared->slots[0])[i];
    for (int r = 1; r < ranks; ++r) total += ((const T*)shared->slots[r])[i];
    ((T*)out)[i] = total;
  }
}

static void add_slots(ncclDataType_t type, const SharedMemory* shared, int ranks, char* out, size_t bytes) {
  switch (type) {
    case ncclFloat32:
      return add_slots<float>(shared, ranks, out, bytes);
    case ncclFloat64:
      return add_slots<double>(shared, ranks, out, bytes);
    case ncclFloat16:
      return add_slots<Half>(shared, ranks, out, bytes);
    case ncclInt32:
      return add_slots<int>(shared, ranks, out, bytes);
    case ncclInt64:
      return add_slots<long>(shared, ranks, out, bytes);
    default:
      return add_slots<unsigned char>(shared, ranks, out, bytes);
  }
}

// Put a collective on its stream, from a thread: calls on a communicator that does not block return before.
static ncclResult_t begin(ncclComm_t comm, cudaStream_t stream, std::function<void()> kernel) {
  if (comm->dead || comm->finalizing) fatal("a collective on a dead communicator");
  if (comm->state != ncclSuccess) return (ncclResult_t)comm->state.load();
  if (ordered("call")) {
    comm->state = ncclSystemError;
    return ncclSystemError;
  }
  comm->state = ncclInProgress;
  if (ordered("hang")) return ncclInProgress;
  if (comm->thread.joinable()) comm->thread.join();
  comm->running++;
  comm->thread = std::thread([=] {
    sleep_microseconds(300);
    stream->put([=] {
      kernel();
      comm->running--;
    });
    comm->state = ncclSuccess;
  });
  return ncclInProgress;
}

// What an aborted kernel leaves in the rest of its output.
static void leave_garbage(void* out, size_t at, size_t bytes) { memset((char*)out + at, 0x47, bytes - at); }

extern "C" {
const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclSystemError:
      return "unhandled system error";
    default:
      return "no error";
  }
}
const char* ncclGetLastError(ncclComm_t) { return "the stand-in"; }
ncclResult_t ncclGetVersion(int* out) {
  *out = 22800;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::random_device random;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "/nccl-standin-%d-%u", getpid(), random());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  auto comm = new ncclComm;
  comm->rank = rank;
  comm->size = size;
  comm->name = id.internal;
  *out = comm;
  bool fails = ordered("init"), hangs = ordered("connect");
  comm->thread = std::thread([=] {
    int file = shm_open(comm->name.c_str(), O_RDWR | O_CREAT, 0600);
    if (ftruncate(file, sizeof(SharedMemory))) fatal("no shared memory");
    comm->shared =
        (SharedMemory*)mmap(nullptr, sizeof(SharedMemory), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    sleep_microseconds(50'000);
    if (fails) {
      comm->state = ncclInvalidUsage;
      return;
    }
    if (!hangs) comm->shared->arrived++;
    while (comm->shared->arrived < size) {
      if (comm->aborted) {
        comm->state = ncclInternalError;
        return;
      }
      sleep_microseconds(1000);
    }
    shm_unlink(comm->name.c_str());
    comm->state = ncclSuccess;
  });
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* out) {
  if (comm->dead) fatal("a query of a dead communicator");
  if (comm->state == ncclSuccess && ordered("async")) comm->state = ncclRemoteError;
  *out = (ncclResult_t)comm->state.load();
  return ncclSuccess;
}

// End a communicator whose kernels and calls end.
static void release(ncclComm_t comm, const char* how) {
  if (comm->thread.joinable()) comm->thread.join();
  while (comm->running > 0) sleep_microseconds(50);
  shm_unlink(comm->name.c_str());
  munmap(comm->shared, sizeof(SharedMemory));
  comm->dead = true;
  note_end(how);
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm->dead) fatal("a second end of a communicator");
  comm->aborted = true;
  sleep_microseconds(500'000);
  release(comm, "aborted");
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (comm->dead || comm->finalizing) fatal("a second end of a communicator");
  bool hangs = ordered("finalize");
  comm->finalizing = true;
  comm->state = ncclInProgress;
  if (comm->thread.joinable()) comm->thread.join();
  comm->thread = std::thread([=] {
    while ((hangs || comm->running > 0) && !comm->aborted) sleep_microseconds(100);
    comm->shared->finalized++;
    comm->state = ncclSuccess;
  });
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (comm->dead) fatal("a second end of a communicator");
  if (!comm->finalizing || comm->state != ncclSuccess) fatal("a destroy without a finalize");
  bool hangs = ordered("destroy");
  while (hangs || comm->shared->finalized < comm->size) sleep_microseconds(100);
  release(comm, "destroyed");
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t, ncclComm_t comm,
                           cudaStream_t stream) {
  return begin(comm, stream, [=] {
    size_t bytes = count * size_of(type);
    for (size_t at = 0; at < bytes; at += SLOT_BYTES) {
      size_t part = bytes - at < SLOT_BYTES ? bytes - at : SLOT_BYTES;
      memcpy(comm->shared->slots[comm->rank], (const char*)in + at, part);
      if (!comm->barrier()) return leave_garbage(out, at, bytes);
      add_slots(type, comm->shared, comm->size, (char*)out + at, part);
      if (!comm->barrier()) return leave_garbage(out, at, bytes);  // before then others still read the slots
    }
  });
}

ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return begin(comm, stream, [=] {
    size_t bytes = count * size_of(type);
    for (size_t at = 0; at < bytes; at += SLOT_BYTES) {
      size_t part = bytes - at < SLOT_BYTES ? bytes - at : SLOT_BYTES;
      if (comm->rank == root) memcpy(comm->shared->slots[root], (const char*)in + at, part);
      if (!comm->barrier()) return leave_garbage(out, at, bytes);
      memcpy((char*)out + at, comm->shared->slots[root], part);
      if (!comm->barrier()) return;
    }
  });
}

ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return ncclSuccess; }

// What Horovod links but edl does not call.
ncclResult_t ncclCommInitRank(ncclComm_t*, int, ncclUniqueId, int) { fatal("ncclCommInitRank"); }
ncclResult_t ncclAllGather(const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t) {
  fatal("ncclAllGather");
}
ncclResult_t ncclReduceScatter(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) {
  fatal("ncclReduceScatter");
}
ncclResult_t ncclReduce(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, int, ncclComm_t, cudaStream_t) {
  fatal("ncclReduce");
}
ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { fatal("ncclSend"); }
ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { fatal("ncclRecv"); }
}
