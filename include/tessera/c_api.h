#ifndef TESSERA_C_API_H
#define TESSERA_C_API_H

/// Tensors of sharded checkpoints, and whole models from them, for C and any language that calls C.
///
///     tessera_source* source = NULL;
///     if (tessera_open("runs/a", NULL, 0, &source) != TESSERA_OK) {
///       fprintf(stderr, "%s\n", tessera_error_message());
///       return 1;
///     }
///     size_t wte = 0;
///     const int64_t begin[] = {0, 0}, end[] = {8, 768};
///     float rows[8 * 768];
///     int status = tessera_find(source, "wte.weight", &wte);
///     if (status == TESSERA_OK)
///       status = tessera_read(source, wte, begin, end, "F32", rows, sizeof(rows));
///     tessera_close(source);
///
/// Functions that return int return a tessera_status. After one other than TESSERA_OK,
/// tessera_error_message() and its kin describe the error. No C++ exception leaves a function.
/// Paths and texts are UTF-8 and end with a NUL byte. Callbacks must not throw or longjmp.
/// Programs built with this header work with later libraries of the same TESSERA_API_VERSION.

#include <stddef.h>
#include <stdint.h>

#ifndef TESSERA_API
#if defined(__GNUC__)
#define TESSERA_API __attribute__((visibility("default")))
#else
#define TESSERA_API
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define TESSERA_API_VERSION 1

/// TESSERA_API_VERSION of the library.
TESSERA_API int tessera_api_version(void);
/// Version of the library: "0.1.0".
TESSERA_API const char* tessera_library_version(void);

typedef enum tessera_status {
  TESSERA_OK = 0,
  TESSERA_INVALID_ARGUMENT = 1,  ///< an argument or option, or a path without a checkpoint
  TESSERA_UNSUPPORTED = 2,       ///< a dtype, format or setting that tessera lacks
  TESSERA_IO = 3,                ///< a file could not be read or written
  TESSERA_CORRUPT = 4,           ///< a file is malformed, incomplete, or fails its checksum
  TESSERA_OUT_OF_MEMORY = 5,
  TESSERA_STOPPED = 6,        ///< a progress callback returned nonzero
  TESSERA_COMMUNICATION = 7,  ///< an exchange callback failed
  TESSERA_INTERNAL = 8        ///< a bug in tessera
} tessera_status;

/// The last error on this thread: what was expected, what was found, and what to do next. Empty
/// after TESSERA_OK. Valid until the next call on this thread.
TESSERA_API const char* tessera_error_message(void);
/// Path of the file or directory that the error concerns; empty if unknown.
TESSERA_API const char* tessera_error_file(void);
/// Name of the tensor that the error concerns; empty if it concerns none.
TESSERA_API const char* tessera_error_tensor(void);

/// An option by name. A list of options may repeat those that take several values. Switches are
/// "true" or "false". Sizes are bytes, or have a unit: "5GB", "256MiB".
typedef struct tessera_option {
  const char* name;
  const char* value;
} tessera_option;

/// Called with the bytes done and the total. Returning nonzero stops the call, which then returns
/// TESSERA_STOPPED. Called by any thread, but never by two at once.
typedef int (*tessera_progress)(void* user, int64_t done, int64_t total);
typedef void (*tessera_text)(void* user, const char* text);

// Reading.

/// Tensors of a checkpoint, open for reading. Threads may use it concurrently.
typedef struct tessera_source tessera_source;

/// Opens a checkpoint of tessera or a run (its newest checkpoint), a Hugging Face model directory,
/// a PyTorch Distributed Checkpoint, FSDP's files per rank, a DeepSpeed run or checkpoint, a file of
/// torch.save, or a GGUF file. Reads metadata only. Tensors have the names of the source; those of
/// optimizer state of a checkpoint of tessera are "optimizer/STATE/NAME".
///
/// Options:
///   step    step of a run; "latest" by default
///   shards  expected number of PyTorch's shard-*.safetensors, which do not record it
///   jobs    threads that read a tensor; 1 by default
///   verify  "chunks" (default) or "whole"; see tessera_read
TESSERA_API int tessera_open(const char* path, const tessera_option* options, size_t option_count,
                             tessera_source** out);
/// Ignores NULL. The names and shapes of the source are invalid afterwards.
TESSERA_API void tessera_close(tessera_source* source);

/// "tessera checkpoint", "Hugging Face model", "PyTorch DCP", "DeepSpeed ZeRO-3 checkpoint", ...
TESSERA_API const char* tessera_source_kind(const tessera_source* source);
/// Directory or file that was opened: of a run, its checkpoint.
TESSERA_API const char* tessera_source_path(const tessera_source* source);

TESSERA_API size_t tessera_tensor_count(const tessera_source* source);
/// Tensor by index, in order of names. The functions of a tensor return NULL or 0 for an index that
/// is not below the count.
TESSERA_API const char* tessera_tensor_name(const tessera_source* source, size_t index);
/// safetensors name of the dtype ("F32", "BF16", "F8_E4M3"), or the source's name of one that
/// safetensors lacks.
TESSERA_API const char* tessera_tensor_dtype(const tessera_source* source, size_t index);
TESSERA_API size_t tessera_tensor_dims(const tessera_source* source, size_t index);
TESSERA_API const int64_t* tessera_tensor_shape(const tessera_source* source, size_t index);
/// Bytes of an element; 0 if tessera_read is TESSERA_UNSUPPORTED for this dtype.
TESSERA_API size_t tessera_tensor_width(const tessera_source* source, size_t index);

/// Finds a tensor by name. @return TESSERA_INVALID_ARGUMENT if there is none
TESSERA_API int tessera_find(const tessera_source* source, const char* name, size_t* index);

/// Reads elements [begin[i], end[i]) of each dim i, row-major, into memory of the caller.
///
/// Verification: checkpoints of tessera have a checksum for each chunk of 256 KiB to 16 MiB; files of
/// torch.save have one for each storage, which is a whole tensor or more; other sources have none.
/// With verify=chunks, the first read of any element of a chunk reads and verifies all of it. With
/// verify=whole, only chunks that lie inside the box are verified; of others, only the elements of
/// the box are read, and gaps of up to 32 KiB between them. Without a checksum, reads are as with
/// verify=whole.
///
/// @param begin, end  an entry per dim; both NULL: the whole tensor
/// @param dtype       NULL: as stored; else "F32", "F16" or "BF16", converted from these or "F64"
/// @param bytes       size of `out`, which must be that of the elements in `dtype`
/// @return TESSERA_CORRUPT, with file and tensor, on a wrong checksum. After an error the contents of
///         `out` are undefined.
TESSERA_API int tessera_read(const tessera_source* source, size_t index, const int64_t* begin,
                             const int64_t* end, const char* dtype, void* out, size_t bytes);

// Whole models.

/// Writes the tensors of a source as a whole model into directory `out`, which is complete or
/// absent after any error. After TESSERA_STOPPED, TESSERA_IO or a kill, the same call continues.
/// Memory is bounded by option "memory"; checksums are verified.
///
/// Options are those of `tessera consolidate`, whose help has more on each: format, what, weights,
/// dtype, max-shard-size, memory, step (a number or "latest"), jobs (1 by default), buffered,
/// overwrite, part, merge-lora, base, config, like, strip, rename, select, exclude, shards, tensors.
/// Options strip, rename, select, exclude and tensors may be repeated. In names, '_' equals '-'.
///
/// @param progress  may be NULL; called every few MiB
/// @param warn      may be NULL; called with warnings before the first write
/// @param report    may be NULL; called once, before a return of TESSERA_OK, with a JSON object:
///                  source, kind, step, committed, waiting, files, tensors, parameters, bytes,
///                  reused_bytes, skipped (a number), seconds. With option part, `committed` is false
///                  for all parts but the last, and `waiting` lists the parts that are not done
TESSERA_API int tessera_consolidate(const char* source, const char* out,
                                    const tessera_option* options, size_t option_count,
                                    tessera_progress progress, tessera_text warn,
                                    tessera_text report, void* user);

// Verification.

/// @param file    name inside the source's directory
/// @param tensor  empty: the problem concerns the whole file
/// @param begin, end  elements, row-major in their chunk; equal if unknown
typedef void (*tessera_problem)(void* user, const char* file, const char* tensor, int64_t begin,
                                int64_t end, const char* what);

/// Reads all tensors of a checkpoint; see tessera_open. Of tessera: checks files, headers, coverage,
/// checksums, and that values are finite. Of another program: checksums, where there are any.
/// Options: step, as in tessera_open; jobs, 1 by default.
///
/// @param problem   may be NULL; called with each problem
/// @param report    may be NULL; called once, before a return of TESSERA_OK or after the problems, with
///                  a JSON object: path, tensors, bytes, unverifiable_bytes, problems (a number)
/// @return TESSERA_CORRUPT if there is a problem; file and tensor are the first one's
TESSERA_API int tessera_verify(const char* path, const tessera_option* options, size_t option_count,
                               tessera_problem problem, tessera_progress progress,
                               tessera_text report, void* user);

// Saving.

/// Part of a tensor that this rank saves. The layout of this struct is fixed.
typedef struct tessera_part {
  const char* state;       ///< NULL: a weight; else optimizer state of one: "exp_avg"
  const char* name;        ///< of the weight
  const char* dtype;       ///< safetensors name; of 1 to 8 bytes per element, and no F8 or U32
  size_t dims;             ///< at most 8
  const int64_t* shape;    ///< of the whole tensor
  const int64_t* offsets;  ///< of the part, per dim
  const int64_t* extents;  ///< of the part, per dim; with a 0, the part only declares the tensor
  const void* data;        ///< elements of the part, row-major; unchanged until the call returns
} tessera_part;

/// Receives the messages of an exchange.
typedef struct tessera_messages tessera_messages;
TESSERA_API void tessera_add_message(tessera_messages* messages, const void* data, size_t bytes);

/// All-gathers a message of at most a few KiB between the ranks of a save, and adds those of all
/// ranks in order of rank. Returns nonzero if that fails. `phase` is the same on all ranks.
typedef int (*tessera_exchange)(void* user, const char* phase, const void* mine, size_t bytes,
                                tessera_messages* all);

/// Saves a checkpoint of tessera as `dir`/step-NNNNNNNN. Called by all ranks. The parts of all ranks
/// must cover each tensor exactly once. Commits by one rename: after an error on any rank, all ranks
/// return an error, and former checkpoints are unchanged.
///
/// Options:
///   step    optimizer updates made so far, required; equal on all ranks
///   rank    0 by default
///   world   number of ranks; 1 by default
///   run-id  of letters, digits, '.', '_' and '-'; equal on all ranks; "run" by default
///   model   JSON object that describes the model; "{}" by default
///   trainer JSON with state of the training loop, which is saved as it is; none by default
///   failed  text of an error that prevents this rank from saving: all ranks then return an error
///
/// On errors in "dir", "rank" or "world" this rank takes part in no exchange; on all others it does, so
/// that no rank waits for it.
///
/// @param exchange  may be NULL if there is one rank
/// @param report    may be NULL; called once, before a return of TESSERA_OK, with a JSON object: path,
///                  bytes (of this rank), total_bytes, seconds
TESSERA_API int tessera_save(const char* dir, const tessera_option* options, size_t option_count,
                             const tessera_part* parts, size_t part_count,
                             tessera_exchange exchange, tessera_text report, void* user);

#ifdef __cplusplus
}
#endif

#endif
