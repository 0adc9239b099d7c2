// SPDX-License-Identifier: Apache-2.0

/* What the measuring programs have in common: time, types, and buffers for them. */
#ifndef MPI_MEMORY_H
#define MPI_MEMORY_H

#include <stdarg.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>

#include "mpi_type.h"

static inline void fail(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	_Exit(1); /* no MPI_Finalize: it would wait for the other rank */
}

static inline int64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static inline void *need(void *p)
{
	if (!p)
		fail("out of memory");
	return p;
}

/* Elements of a type. */
struct elements {
	MPI_Datatype type; /* committed */
	int count;
	int size;	 /* bytes of the stream, which MPI counts in int */
	MPI_Aint lo, hi; /* bytes lo to hi-1 of the buffer are touched */
};

static inline void elements_read(FILE *f, long count, struct elements *e)
{
	const char *wrong = mpi_type_read(f, &e->type);
	MPI_Aint lb, extent;
	MPI_Count size;

	if (wrong)
		fail("%s", wrong);
	if (count < 0 || count > INT_MAX)
		fail("%ld elements: MPI-3 counts them in int", count);
	MPI_Type_commit(&e->type);
	MPI_Type_size_x(e->type, &size);
	if (size < 0 || (count && size > INT_MAX / count))
		fail("%ld elements of %lld bytes: MPI-3 counts packed bytes in int", count, (long long)size);
	e->count = count;
	e->size = size * count;
	e->lo = e->hi = 0;
	if (!e->size)
		return;
	MPI_Type_get_true_extent(e->type, &lb, &extent);
	e->lo = lb;
	e->hi = lb + extent;
	MPI_Type_get_extent(e->type, &lb, &extent);
	if (extent < 0)
		e->lo += (count - 1) * extent;
	else
		e->hi += (count - 1) * extent;
}

/* A buffer for elements. Displacement 0 is at origin, on a page boundary as far as the
 * type goes forward only. */
struct buffer {
	char *memory;
	size_t length; /* hi - lo */
	char *origin;
};

enum { PAGE = 4096 };

static inline struct buffer buffer_new(const struct elements *e)
{
	struct buffer b = {.length = e->hi - e->lo};
	size_t before = e->lo < 0 ? (-e->lo + PAGE - 1) / PAGE * PAGE + e->lo : e->lo % PAGE;

	b.memory = (char *)need(aligned_alloc(PAGE, (before + b.length + PAGE) / PAGE * PAGE)) + before;
	b.origin = b.memory - e->lo;
	return b;
}

static inline void buffer_free(const struct buffer *b)
{
	free((char *)((uintptr_t)b->memory / PAGE * PAGE));
}

/* Fills a buffer with what FPsPIN sends. */
static inline void buffer_pattern(const struct buffer *b)
{
	for (size_t i = 0; i < b->length; i++)
		b->memory[i] = 32 + i % 95;
}

/* Returns the stream of a buffer with the pattern. */
static inline char *stream_new(const struct elements *e)
{
	struct buffer b = buffer_new(e);
	char *stream = need(malloc(e->size + 1));
	int position = 0;

	buffer_pattern(&b);
	MPI_Pack(b.origin, e->count, e->type, stream, e->size, &position, MPI_COMM_WORLD);
	if (position != e->size)
		fail("packed %d bytes of %d", position, e->size);
	buffer_free(&b);
	return stream;
}

/* Prints measurements and that they are all. */
static inline void answer(const int64_t *ns, long n)
{
	for (long i = 0; i < n; i++)
		printf("%lld\n", (long long)ns[i]);
	printf("ok\n");
	fflush(stdout);
}

#endif
