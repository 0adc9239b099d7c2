// SPDX-License-Identifier: Apache-2.0

/*
 * Says what MPICH makes of datatypes: how large they are, what they pack and unpack. One
 * process that answers until its standard input ends; it answers in order, so that the
 * other end may ask ahead. All integers are 64 bits, as the machine has them.
 *
 *	question: count, origin, lengths of text, memory and stream; text, memory, stream
 *	answer: length of the error; size, extent, lb, true lb, true extent, lengths of
 *	        packed and memory; error, packed, memory
 *
 * The text is the type, for mpi_type.h. The memory's byte at origin is displacement 0 of
 * count elements. Packed is what these pack to; then the stream is unpacked into them, and
 * memory is what that makes of the memory. A stream of length -1 is none.
 */
#include "mpi_type.h"

#include <stdint.h>

enum { COUNT, ORIGIN, TEXT, MEMORY, STREAM, QUESTION };
/* Around the memory there is room for types of which MPICH and the other end think different
 * things: these should not end this process. */
#define ROOM (1 << 20)

enum { ERROR, SIZE, EXTENT, LB, TRUE_LB, TRUE_EXTENT, PACKED, AFTER, ANSWER };

/* Reads n bytes to where room bytes are before and after them. */
static char *get(int64_t n, int64_t room)
{
	char *bytes = malloc(n + 2 * room + 1);

	if (!bytes || fread(bytes + room, 1, n, stdin) != (size_t)n) {
		fprintf(stderr, "mpi_compare: no %lld bytes\n", (long long)n);
		exit(1);
	}
	return bytes;
}

static const char *failed(const char *call, int ret)
{
	static char error[MPI_MAX_ERROR_STRING + 64];
	int len, at = snprintf(error, sizeof error, "%s: ", call);

	MPI_Error_string(ret, error + at, &len);
	return error;
}

#define CALL(f, ...) do { int ret_ = f(__VA_ARGS__); if (ret_) return failed(#f, ret_); } while (0)

static const char *compare(const int64_t *q, int64_t *a, MPI_Datatype *type, char *memory, char *stream, char **packed)
{
	MPI_Count size, lb, extent, true_lb, true_extent;
	int64_t lo, hi, walk;
	int at = 0;

	CALL(MPI_Type_commit, type);
	CALL(MPI_Type_size_x, *type, &size);
	CALL(MPI_Type_get_extent_x, *type, &lb, &extent);
	CALL(MPI_Type_get_true_extent_x, *type, &true_lb, &true_extent);
	a[SIZE] = size;
	a[EXTENT] = extent;
	a[LB] = lb;
	a[TRUE_LB] = true_lb;
	a[TRUE_EXTENT] = true_extent;

	walk = (q[COUNT] - 1) * extent;
	lo = q[ORIGIN] + true_lb + (walk < 0 ? walk : 0);
	hi = q[ORIGIN] + true_lb + true_extent + (walk > 0 ? walk : 0);
	if (size * q[COUNT] > 0 && (lo < -ROOM || hi > q[MEMORY] + ROOM))
		return "reaches far outside of the memory";
	if (size * q[COUNT] > INT_MAX || (q[STREAM] >= 0 && q[STREAM] != size * q[COUNT]))
		return "a stream of another length";

	*packed = malloc(size * q[COUNT] + 1);
	CALL(MPI_Pack, memory + q[ORIGIN], q[COUNT], *type, *packed, size * q[COUNT], &at, MPI_COMM_SELF);
	a[PACKED] = at;
	if (q[STREAM] < 0)
		return NULL;
	at = 0;
	CALL(MPI_Unpack, stream, q[STREAM], &at, memory + q[ORIGIN], q[COUNT], *type, MPI_COMM_SELF);
	a[AFTER] = q[MEMORY];
	return at == q[STREAM] ? NULL : "MPI_Unpack left some of the stream";
}

int main(void)
{
	int64_t q[QUESTION];

	/* Else it would listen on all interfaces. */
	setenv("UCX_TLS", "self", 1);
	if (MPI_Init(NULL, NULL))
		return 1;
	MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
	MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);

	while (fread(q, sizeof q, 1, stdin) == 1) {
		char *text = get(q[TEXT], 0), *room = get(q[MEMORY], ROOM), *memory = room + ROOM;
		char *stream = get(q[STREAM] < 0 ? 0 : q[STREAM], 0), *packed = NULL;
		int64_t a[ANSWER] = {0};
		MPI_Datatype type = MPI_DATATYPE_NULL;
		FILE *f = fmemopen(text, q[TEXT], "r");
		const char *wrong = f ? mpi_type_read(f, &type) : "no text";

		if (!wrong)
			wrong = compare(q, a, &type, memory, stream, &packed);
		if (wrong) {
			a[ERROR] = strlen(wrong);
			a[PACKED] = a[AFTER] = 0;
		}
		fwrite(a, sizeof a, 1, stdout);
		fwrite(wrong, 1, a[ERROR], stdout);
		fwrite(packed, 1, a[PACKED], stdout);
		fwrite(memory, 1, a[AFTER], stdout);
		fflush(stdout);
		if (f)
			fclose(f);
		mpi_type_free(&type);
		free(packed);
		free(stream);
		free(room);
		free(text);
	}
	return MPI_Finalize();
}
