// SPDX-License-Identifier: Apache-2.0

/*
 * Reads a datatype that mpich.Encode has written and builds it, with the calls of MPI that
 * made it:
 *
 *	MPI_Datatype type;
 *	const char *wrong = mpi_type_read(stdin, &type);
 *
 * Text, a count and as many lines, of which each makes a type of the earlier ones, that it
 * names by their numbers; the first line is number 0, the last one makes the type itself.
 *
 *	named NAME
 *	ctg COUNT TYPE
 *	vec COUNT BLOCKLEN STRIDE TYPE			hvec: stride in bytes
 *	idx N (DISPL BLOCKLEN)... TYPE			hidx: in bytes
 *	idxb N BLOCKLEN DISPL... TYPE			hidxb: in bytes
 *	struct N (DISPL BLOCKLEN TYPE)...
 *	subarray N (SIZE SUBSIZE START)... TYPE		subarrayf: Fortran order
 *	darray SIZE RANK N (GSIZE DISTRIB ARG PSIZE)... TYPE	darrayf: Fortran order
 *	resized LB EXTENT TYPE
 *	dup TYPE
 *
 * Distributions are 0 block, 1 cyclic, 2 none; their argument is -1 for the default.
 * Numbers that MPI-3 has as int are refused if they are none.
 */
#ifndef MPI_TYPE_H
#define MPI_TYPE_H

#include <limits.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(WANT_MPICH_VERSION) && !defined(MPICH_VERSION) || defined(WANT_OPEN_MPI) && !defined(OPEN_MPI)
#error "mpi.h is another library's"
#endif

static const struct {
	const char *name;
	MPI_Datatype type;
} mpi_type_names[] = {
	{"byte", MPI_BYTE},
	{"char", MPI_CHAR},
	{"schar", MPI_SIGNED_CHAR},
	{"uchar", MPI_UNSIGNED_CHAR},
	{"wchar", MPI_WCHAR},
	{"short", MPI_SHORT},
	{"ushort", MPI_UNSIGNED_SHORT},
	{"int", MPI_INT},
	{"unsigned", MPI_UNSIGNED},
	{"long", MPI_LONG},
	{"ulong", MPI_UNSIGNED_LONG},
	{"longlong", MPI_LONG_LONG_INT},
	{"ulonglong", MPI_UNSIGNED_LONG_LONG},
	{"float", MPI_FLOAT},
	{"double", MPI_DOUBLE},
	{"longdouble", MPI_LONG_DOUBLE},
	{"bool", MPI_C_BOOL},
	{"int8", MPI_INT8_T},
	{"int16", MPI_INT16_T},
	{"int32", MPI_INT32_T},
	{"int64", MPI_INT64_T},
	{"uint8", MPI_UINT8_T},
	{"uint16", MPI_UINT16_T},
	{"uint32", MPI_UINT32_T},
	{"uint64", MPI_UINT64_T},
	{"cfloat", MPI_C_FLOAT_COMPLEX},
	{"cdouble", MPI_C_DOUBLE_COMPLEX},
	{"clongdouble", MPI_C_LONG_DOUBLE_COMPLEX},
	{"aint", MPI_AINT},
	{"offset", MPI_OFFSET},
	{"count", MPI_COUNT},
	{"packed", MPI_PACKED},
	{"integer", MPI_INTEGER},
	{"real", MPI_REAL},
	{"double_precision", MPI_DOUBLE_PRECISION},
	{"complex", MPI_COMPLEX},
	{"double_complex", MPI_DOUBLE_COMPLEX},
	{"logical", MPI_LOGICAL},
	{"character", MPI_CHARACTER},
	{"float_int", MPI_FLOAT_INT},
	{"double_int", MPI_DOUBLE_INT},
	{"long_int", MPI_LONG_INT},
	{"int_int", MPI_2INT},
	{"short_int", MPI_SHORT_INT},
	{"longdouble_int", MPI_LONG_DOUBLE_INT},
};

struct mpi_type_reader {
	FILE *f;
	const char *wrong; /* the first thing that was; all calls do nothing then */
	MPI_Datatype *types;
	long made;
};

static inline long mpi_type_wrong(struct mpi_type_reader *r, const char *what)
{
	if (!r->wrong)
		r->wrong = what;
	return 0;
}

/* Reads the next word. Scanf would take longer than MPI does. */
static inline void mpi_type_word(struct mpi_type_reader *r, char *word, size_t size)
{
	size_t n = 0;
	int c;

	do
		c = getc_unlocked(r->f);
	while (c == ' ' || c == '\n');
	for (; c != ' ' && c != '\n' && c != EOF && n < size - 1; c = getc_unlocked(r->f))
		word[n++] = c;
	word[n] = 0;
	if (c == EOF)
		mpi_type_wrong(r, "the text ends too early");
}

static inline long mpi_type_number(struct mpi_type_reader *r, long lo, long hi)
{
	char word[32], *end;
	long n;

	if (r->wrong)
		return 0;
	mpi_type_word(r, word, sizeof word);
	n = strtol(word, &end, 10);
	if (end == word || *end)
		return mpi_type_wrong(r, "not a number");
	if (n < lo || n > hi)
		return mpi_type_wrong(r, "a number that MPI-3's calls, or the text, do not have room for");
	return n;
}

static inline int mpi_type_int(struct mpi_type_reader *r)
{
	return mpi_type_number(r, INT_MIN, INT_MAX);
}

static inline MPI_Aint mpi_type_aint(struct mpi_type_reader *r)
{
	return mpi_type_number(r, LONG_MIN, LONG_MAX);
}

/* Reads the number of a type that is made. */
static inline MPI_Datatype mpi_type_old(struct mpi_type_reader *r)
{
	long i = mpi_type_number(r, 0, r->made - 1);

	return r->wrong ? MPI_DATATYPE_NULL : r->types[i];
}

/* Reads how many entries there are, and makes room for them: w columns of size bytes. */
static inline int mpi_type_entries(struct mpi_type_reader *r, size_t size, char **room)
{
	int n = mpi_type_number(r, 0, INT_MAX);

	*room = r->wrong ? NULL : malloc((size_t)n * size + 1);
	if (!*room)
		mpi_type_wrong(r, "out of memory");
	return r->wrong ? 0 : n;
}

static inline int mpi_type_index(struct mpi_type_reader *r, int bytes, MPI_Datatype *new)
{
	char *room;
	int n = mpi_type_entries(r, sizeof(MPI_Aint) + 2 * sizeof(int), &room), ret = MPI_SUCCESS;
	MPI_Aint *places = (MPI_Aint *)room;
	int *displs = (int *)(places + n), *blocklens = displs + n;
	MPI_Datatype old;

	for (int i = 0; i < n; i++) {
		if (bytes)
			places[i] = mpi_type_aint(r);
		else
			displs[i] = mpi_type_int(r);
		blocklens[i] = mpi_type_int(r);
	}
	old = mpi_type_old(r);
	if (!r->wrong)
		ret = bytes ? MPI_Type_create_hindexed(n, blocklens, places, old, new)
			    : MPI_Type_indexed(n, blocklens, displs, old, new);
	free(room);
	return ret;
}

static inline int mpi_type_index_block(struct mpi_type_reader *r, int bytes, MPI_Datatype *new)
{
	char *room;
	int n = mpi_type_entries(r, sizeof(MPI_Aint), &room), ret = MPI_SUCCESS;
	int blocklen = mpi_type_int(r), *displs = (int *)room;
	MPI_Aint *places = (MPI_Aint *)room;
	MPI_Datatype old;

	for (int i = 0; i < n; i++)
		if (bytes)
			places[i] = mpi_type_aint(r);
		else
			displs[i] = mpi_type_int(r);
	old = mpi_type_old(r);
	if (!r->wrong)
		ret = bytes ? MPI_Type_create_hindexed_block(n, blocklen, places, old, new)
			    : MPI_Type_create_indexed_block(n, blocklen, displs, old, new);
	free(room);
	return ret;
}

static inline int mpi_type_struct(struct mpi_type_reader *r, MPI_Datatype *new)
{
	char *room;
	int n = mpi_type_entries(r, sizeof(MPI_Aint) + sizeof(MPI_Datatype) + sizeof(int), &room), ret = MPI_SUCCESS;
	MPI_Aint *displs = (MPI_Aint *)room;
	MPI_Datatype *types = (MPI_Datatype *)(displs + n);
	int *blocklens = (int *)(types + n);

	for (int i = 0; i < n; i++) {
		displs[i] = mpi_type_aint(r);
		blocklens[i] = mpi_type_int(r);
		types[i] = mpi_type_old(r);
	}
	if (!r->wrong)
		ret = MPI_Type_create_struct(n, blocklens, displs, types, new);
	free(room);
	return ret;
}

static inline int mpi_type_subarray(struct mpi_type_reader *r, int order, MPI_Datatype *new)
{
	char *room;
	int n = mpi_type_entries(r, 3 * sizeof(int), &room), ret = MPI_SUCCESS;
	int *sizes = (int *)room, *subsizes = sizes + n, *starts = subsizes + n;
	MPI_Datatype old;

	for (int i = 0; i < n; i++) {
		sizes[i] = mpi_type_int(r);
		subsizes[i] = mpi_type_int(r);
		starts[i] = mpi_type_int(r);
	}
	old = mpi_type_old(r);
	if (!r->wrong)
		ret = MPI_Type_create_subarray(n, sizes, subsizes, starts, order, old, new);
	free(room);
	return ret;
}

static inline int mpi_type_darray(struct mpi_type_reader *r, int order, MPI_Datatype *new)
{
	static const int distributions[] = {MPI_DISTRIBUTE_BLOCK, MPI_DISTRIBUTE_CYCLIC, MPI_DISTRIBUTE_NONE};
	int size = mpi_type_int(r), rank = mpi_type_int(r);
	char *room;
	int n = mpi_type_entries(r, 4 * sizeof(int), &room), ret = MPI_SUCCESS;
	int *gsizes = (int *)room, *distribs = gsizes + n, *dargs = distribs + n, *psizes = dargs + n;
	MPI_Datatype old;

	for (int i = 0; i < n; i++) {
		gsizes[i] = mpi_type_int(r);
		distribs[i] = distributions[mpi_type_number(r, 0, 2)];
		dargs[i] = mpi_type_int(r);
		if (dargs[i] == -1)
			dargs[i] = MPI_DISTRIBUTE_DFLT_DARG;
		psizes[i] = mpi_type_int(r);
	}
	old = mpi_type_old(r);
	if (!r->wrong)
		ret = MPI_Type_create_darray(size, rank, n, gsizes, distribs, dargs, psizes, order, old, new);
	free(room);
	return ret;
}

static inline int mpi_type_named(struct mpi_type_reader *r, MPI_Datatype *new)
{
	char name[64];

	mpi_type_word(r, name, sizeof name);
	for (size_t i = 0; i < sizeof mpi_type_names / sizeof *mpi_type_names; i++)
		if (!strcmp(name, mpi_type_names[i].name)) {
			*new = mpi_type_names[i].type;
			return MPI_SUCCESS;
		}
	mpi_type_wrong(r, "no such predefined type");
	return MPI_SUCCESS;
}

/* Reads a line. The compiler may evaluate arguments in any order: none of them reads. */
static inline int mpi_type_line(struct mpi_type_reader *r, MPI_Datatype *new)
{
	char c[16];
	MPI_Aint lb, extent;
	int count, blocklen, stride;

	mpi_type_word(r, c, sizeof c);
	if (!strcmp(c, "named"))
		return mpi_type_named(r, new);
	if (!strcmp(c, "idx") || !strcmp(c, "hidx"))
		return mpi_type_index(r, *c == 'h', new);
	if (!strcmp(c, "idxb") || !strcmp(c, "hidxb"))
		return mpi_type_index_block(r, *c == 'h', new);
	if (!strcmp(c, "struct"))
		return mpi_type_struct(r, new);
	if (!strcmp(c, "subarray") || !strcmp(c, "subarrayf"))
		return mpi_type_subarray(r, c[8] == 'f' ? MPI_ORDER_FORTRAN : MPI_ORDER_C, new);
	if (!strcmp(c, "darray") || !strcmp(c, "darrayf"))
		return mpi_type_darray(r, c[6] == 'f' ? MPI_ORDER_FORTRAN : MPI_ORDER_C, new);

	MPI_Datatype old = MPI_DATATYPE_NULL;
	if (!strcmp(c, "ctg")) {
		count = mpi_type_int(r);
		old = mpi_type_old(r);
		return r->wrong ? MPI_SUCCESS : MPI_Type_contiguous(count, old, new);
	}
	if (!strcmp(c, "vec")) {
		count = mpi_type_int(r);
		blocklen = mpi_type_int(r);
		stride = mpi_type_int(r);
		old = mpi_type_old(r);
		return r->wrong ? MPI_SUCCESS : MPI_Type_vector(count, blocklen, stride, old, new);
	}
	if (!strcmp(c, "hvec")) {
		count = mpi_type_int(r);
		blocklen = mpi_type_int(r);
		lb = mpi_type_aint(r);
		old = mpi_type_old(r);
		return r->wrong ? MPI_SUCCESS : MPI_Type_create_hvector(count, blocklen, lb, old, new);
	}
	if (!strcmp(c, "resized")) {
		lb = mpi_type_aint(r);
		extent = mpi_type_aint(r);
		old = mpi_type_old(r);
		return r->wrong ? MPI_SUCCESS : MPI_Type_create_resized(old, lb, extent, new);
	}
	if (!strcmp(c, "dup")) {
		old = mpi_type_old(r);
		return r->wrong ? MPI_SUCCESS : MPI_Type_dup(old, new);
	}
	mpi_type_wrong(r, "no such constructor");
	return MPI_SUCCESS;
}

static inline void mpi_type_free(MPI_Datatype *type)
{
	int integers, addresses, types, combiner;

	if (*type == MPI_DATATYPE_NULL || MPI_Type_get_envelope(*type, &integers, &addresses, &types, &combiner) ||
	    combiner == MPI_COMBINER_NAMED)
		return;
	MPI_Type_free(type);
}

/*
 * Reads a type from f. It returns NULL, and in type what mpi_type_free frees, not
 * committed; or what is wrong, in a text that the next call overwrites. Errors of MPI come
 * back only if MPI_COMM_WORLD and MPI_COMM_SELF return them, else they end the process.
 */
static inline const char *mpi_type_read(FILE *f, MPI_Datatype *type)
{
	static char error[MPI_MAX_ERROR_STRING + 64];
	struct mpi_type_reader r = {.f = f};
	long n = mpi_type_number(&r, 1, INT_MAX);

	*type = MPI_DATATYPE_NULL;
	if (!r.wrong && !(r.types = malloc(n * sizeof *r.types)))
		mpi_type_wrong(&r, "out of memory");
	while (!r.wrong && r.made < n) {
		MPI_Datatype new = MPI_DATATYPE_NULL;
		int ret = mpi_type_line(&r, &new), len;

		if (r.wrong) {
			int at = snprintf(error, sizeof error, "type %ld: ", r.made);
			snprintf(error + at, sizeof error - at, "%s", r.wrong);
			r.wrong = error;
		} else if (ret) {
			int at = snprintf(error, sizeof error, "type %ld: ", r.made);
			MPI_Error_string(ret, error + at, &len);
			r.wrong = error;
		} else {
			r.types[r.made++] = new;
		}
	}
	if (!r.wrong)
		*type = r.types[--r.made];
	while (r.made)
		mpi_type_free(&r.types[--r.made]);
	free(r.types);
	return r.wrong;
}

#endif
