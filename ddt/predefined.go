// SPDX-License-Identifier: Apache-2.0

package ddt

// The predefined types that programs name most, by the C ABI of amd64 Linux. Lookup finds
// these and all others.
var (
	Byte       = builtin("byte", 1, 1)
	Char       = builtin("char", 1, 1)
	Short      = builtin("short", 2, 2)
	Int        = builtin("int", 4, 4)
	Long       = builtin("long", 8, 8)
	Float      = builtin("float", 4, 4)
	Double     = builtin("double", 8, 8)
	LongDouble = builtin("longdouble", 16, 16)
)

// null is MPI_DATATYPE_NULL: a name, and not a type that others can be made of.
var null = &Type{contents: Contents{Name: "null"}, align: 1}

var (
	named = []*Type{
		// C. First the names that FPsPIN has for them.
		Byte, Char, Int,
		builtin("int32", 4, 4),
		builtin("int64", 8, 8),
		builtin("uchar", 1, 1),
		Short,
		builtin("ushort", 2, 2),
		Long,
		builtin("ulong", 8, 8),
		builtin("ulonglong", 8, 8),
		builtin("unsigned", 4, 4),
		Float, Double, LongDouble,

		builtin("schar", 1, 1),
		builtin("wchar", 4, 4),
		builtin("longlong", 8, 8),
		builtin("bool", 1, 1),
		builtin("int8", 1, 1),
		builtin("int16", 2, 2),
		builtin("uint8", 1, 1),
		builtin("uint16", 2, 2),
		builtin("uint32", 4, 4),
		builtin("uint64", 8, 8),
		builtin("cfloat", 8, 4),
		builtin("cdouble", 16, 8),
		builtin("clongdouble", 32, 16),
		builtin("aint", 8, 8),
		builtin("offset", 8, 8),
		builtin("count", 8, 8),
		builtin("packed", 1, 1),

		// Fortran, with INTEGER, REAL and LOGICAL of 4 bytes.
		builtin("integer", 4, 4),
		builtin("real", 4, 4),
		builtin("double_precision", 8, 8),
		builtin("complex", 8, 4),
		builtin("double_complex", 16, 8),
		builtin("logical", 4, 4),
		builtin("character", 1, 1),

		// Pairs, of MPI_MINLOC and MPI_MAXLOC.
		pair("float_int", Float),
		pair("double_int", Double),
		pair("long_int", Long),
		pair("int_int", Int),
		pair("short_int", Short),
		pair("longdouble_int", LongDouble),
	}

	byName = func() map[string]*Type {
		m := map[string]*Type{"null": null}
		for _, t := range named {
			m[t.contents.Name] = t
		}
		return m
	}()
)

func builtin(name string, size, align int64) *Type {
	return &Type{
		contents: Contents{Name: name},
		size:     size,
		ub:       size,
		trueUB:   size,
		align:    align,
	}
}

// pair returns what C makes of struct { T value; int index; }.
func pair(name string, value *Type) *Type {
	index := (value.size + Int.align - 1) / Int.align * Int.align
	t, err := Struct([]int64{1, 1}, []int64{0, index}, []*Type{value, Int})
	if err != nil {
		panic(err)
	}
	t.contents = Contents{Name: name}
	t.depth = 0
	return t
}

// Lookup returns the predefined type of a name: that of the type in C or Fortran, as
// Parse reads it. The name null is known, but constructors refuse it as MPI does.
func Lookup(name string) (t *Type, ok bool) {
	t, ok = byName[name]
	return t, ok
}

// Predefined returns the names of all predefined types, without null.
func Predefined() []string {
	names := make([]string, len(named))
	for i, t := range named {
		names[i] = t.contents.Name
	}
	return names
}
