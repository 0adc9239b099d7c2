// SPDX-License-Identifier: Apache-2.0

package ddt

import "fmt"

// Sizes of C types of the arrays.
const (
	sizeFloat  = 4
	sizeDouble = 8
)

// Limits of parameters. With them no product of this file overflows.
const (
	maxDim   = 1 << 14 // of arrays of three or four dimensions
	maxVars  = 1 << 8  // of arrays in a message
	maxCells = 1 << 24 // of an array that indices point into
	maxIndex = 1 << 20 // of an index list
)

func dimParam(name, help string, value int64) Param {
	return Param{Name: name, Help: help, Default: value, Min: 1, Max: maxDim}
}

func cellsParam(name, help string, value int64) Param {
	return Param{Name: name, Help: help, Default: value, Min: 1, Max: maxCells}
}

func pickedParam(name, help string, value int64) Param {
	return Param{Name: name, Help: help, Default: value, Min: 1, Max: maxIndex}
}

var seedParam = Param{Name: "seed", Help: "of the index list", Default: 1, Min: 0, Max: 1<<63 - 1}

// apps are what the programs do, with inputs of theirs where these are known. SC 2019
// shows sizes only in a figure; blocks of 4 bytes of SPECFEM3D_oc are 512 in its packets
// of 2048 bytes, as it says.
var apps = []App{
	newApp("COMB",
		"ghost cells of a 3-D mesh from one of 26 neighbours: 80000 bytes in 100 blocks, 2.7 per packet",
		"Comb (LLNL), Box3d::get_type_subarray, on 100 x 100 x 100 zones with one ghost",
		[]Param{
			dimParam("nx", "zones of a process, fastest", 100),
			dimParam("ny", "zones of a process", 100),
			dimParam("nz", "zones of a process, slowest", 100),
			{"ghost", "ghost zones on each side", 1, 1, 64},
			{"x", "neighbour: -1, 0 or 1", 0, -1, 1},
			{"y", "neighbour: -1, 0 or 1", 1, -1, 1},
			{"z", "neighbour: -1, 0 or 1", 0, -1, 1},
			{"vars", "variables in the message, mesh after mesh", 1, 1, maxVars},
		}, comb),
	newApp("FFT2D",
		"a transposed tile of a matrix of complex doubles: 589824 bytes in 36864 blocks, 88.0 per packet",
		"ddtbench timing_fft2d, the type that is received, 1536 x 1536 on 8 processes",
		[]Param{
			dimParam("n", "rows and columns of the matrix", 1536),
			dimParam("procs", "processes, a divisor of n", 8),
		}, fft2d),
	newApp("LAMMPS",
		"four properties of picked atoms: 11664 bytes in 972 blocks, 108.3 per packet",
		"ddtbench timing_lammps_atomic, crack example on 2 processes; indices drawn at random, as there",
		[]Param{
			cellsParam("local", "atoms of the process", 4084),
			pickedParam("sent", "atoms in the message, and room for as many ghosts", 243),
			seedParam,
		}, func(n numbers) (*Type, error) { return lammps(n, 3) }),
	newApp("LAMMPS_full",
		"six properties of picked atoms: 195968 bytes in 18372 blocks, 131.5 per packet",
		"ddtbench timing_lammps_full, peptide example on 2 processes; indices drawn at random, as there",
		[]Param{
			cellsParam("local", "atoms of the process", 3534),
			pickedParam("sent", "atoms in the message, and room for as many ghosts", 3062),
			seedParam,
		}, func(n numbers) (*Type, error) { return lammps(n, 5) }),
	newApp("MILC",
		"a z slice of a 4-D lattice of su3 vectors, even and odd sites: 98304 bytes in 32 blocks, 1.4 per packet",
		"ddtbench timing_milc_su3_zdown, 16 x 16 x 16 x 16 sites",
		[]Param{
			dimParam("nx", "sites, fastest; nx * ny is even", 16),
			dimParam("ny", "sites", 16),
			dimParam("nz", "sites", 16),
			dimParam("nt", "sites, slowest", 16),
		}, milc),
	newApp("NAS_LU",
		"a column of cells of five doubles: 16320 bytes in 408 blocks, 34.8 per packet",
		"ddtbench timing_nas_lu_y, 408 x 408",
		[]Param{
			dimParam("ny", "cells in a row, and two of halo", 408),
			dimParam("nz", "rows", 408),
		}, nasLU),
	newApp("NAS_MG",
		"a face of a 3-D grid of doubles: 32768 bytes in 4096 blocks, 170.7 per packet",
		"ddtbench timing_nas_mg_x, _y and _z, 130 x 66 x 66",
		[]Param{
			{"nx", "points with halo, fastest", 130, 3, maxDim},
			{"ny", "points with halo", 66, 3, maxDim},
			{"nz", "points with halo, slowest", 66, 3, maxDim},
			{"face", "normal to x (0), y (1) or z (2)", 0, 0, 2},
		}, nasMG),
	newApp("SPECFEM3D_oc",
		"picked floats, points of the outer core: 12900 bytes in 3225 blocks, 322.5 per packet",
		"ddtbench timing_specfem3D_oc, 10 x 10 x 6, c=4; indices drawn at random, as there",
		[]Param{
			cellsParam("points", "of the mesh", 88881),
			pickedParam("sent", "points in the message", 3225),
			seedParam,
		}, specfemOC),
	newApp("SPECFEM3D_cm",
		"picked vectors of three floats, points of crust and mantle and of the inner core: 177672 bytes in 14806 blocks, 117.2 per packet",
		"ddtbench timing_specfem3D_cm, 10 x 10 x 6, c=4; indices drawn at random, as there",
		[]Param{
			cellsParam("cm", "points of crust and mantle", 834917),
			pickedParam("cm_sent", "of them in the message", 11797),
			cellsParam("ic", "points of the inner core", 51153),
			pickedParam("ic_sent", "of them in the message", 3009),
			seedParam,
		}, specfemCM),
	newApp("SW4LITE_x",
		"halo in x of a 3-D grid of three doubles: 221952 bytes in 4624 blocks, 29.9 per packet",
		"sw4lite EW::setupMPICommunications, m_send_type3[2g], in Fortran order; 64 x 64 x 64 of our choice",
		sw4Params(), sw4x),
	newApp("SW4LITE_y",
		"halo in y of a 3-D grid of three doubles: 221952 bytes in 68 blocks, 1.4 per packet",
		"sw4lite EW::setupMPICommunications, m_send_type3[2g+1], in Fortran order; 64 x 64 x 64 of our choice",
		sw4Params(), sw4y),
	newApp("WRF_x",
		"halo in x of 2-D, 3-D and 4-D arrays of floats: 173712 bytes in 14476 blocks, 117.4 per packet",
		"ddtbench timing_wrf_sa, em_b_wave on 2 x 2 processes, xp",
		wrfParams(22, 3, 4, 44), wrf),
	newApp("WRF_y",
		"halo in y of 2-D, 3-D and 4-D arrays of floats: 90804 bytes in 987 blocks, 16.1 per packet",
		"ddtbench timing_wrf_sa, em_b_wave on 2 x 2 processes, ym",
		wrfParams(5, 23, 7, 3), wrf),
	newApp("Simple",
		"floats in a row: 110592 bytes in 1 block, 1.0 per packet",
		"FPsPIN's evaluation, dt-1",
		[]Param{{"floats", "in a row", 27648, 1, 1 << 40}},
		func(n numbers) (*Type, error) { return Contiguous(n["floats"], Float) }),
	newApp("Complex",
		"a halo of MILC, nested five deep, which overlaps itself: 110592 bytes in 256 blocks, 4.2 per packet",
		"FPsPIN's evaluation, dt-0",
		nil, complexHalo),
}

// comb is a subarray in Fortran order, one for each variable.
func comb(n numbers) (*Type, error) {
	if n["x"] == 0 && n["y"] == 0 && n["z"] == 0 {
		return nil, fmt.Errorf("x, y and z are 0: that is the process itself, not a neighbour")
	}
	var sizes, subsizes, starts []int64
	for _, axis := range []string{"x", "y", "z"} {
		zones, ghost := n["n"+axis], n["ghost"]
		size, start, subsize := zones+2*ghost, ghost, zones
		switch n[axis] {
		case -1:
			start, subsize = 0, ghost
		case 1:
			start, subsize = ghost+zones, ghost
		}
		sizes, subsizes, starts = append(sizes, size), append(subsizes, subsize), append(starts, start)
	}
	t, err := Subarray(sizes, subsizes, starts, Fortran, Double)
	if err != nil {
		return nil, err
	}
	return Contiguous(n["vars"], t)
}

// fft2d has a column of the tile for each row that the other process sent.
func fft2d(n numbers) (*Type, error) {
	if n["n"]%n["procs"] != 0 {
		return nil, fmt.Errorf("%d processes: want a divisor of n=%d", n["procs"], n["n"])
	}
	tile := n["n"] / n["procs"]
	value, err := Contiguous(2, Double)
	if err != nil {
		return nil, err
	}
	column, err := NewVector(tile, 1, n["n"], value)
	if err != nil {
		return nil, err
	}
	next, err := Resized(column, 0, 2*sizeDouble)
	if err != nil {
		return nil, err
	}
	return Contiguous(tile, next)
}

// lammps has the positions of the picked atoms, then each of their other properties. All
// are arrays of doubles, one after the other.
func lammps(n numbers, others int64) (*Type, error) {
	atoms, err := pick(n["sent"], n["local"], n["seed"])
	if err != nil {
		return nil, err
	}
	scalars, err := IndexedBlock(1, atoms, Double)
	if err != nil {
		return nil, err
	}
	positions, err := IndexedBlock(3, times3(atoms), Double)
	if err != nil {
		return nil, err
	}
	room := (n["local"] + n["sent"]) * sizeDouble
	blocklens, displs, types := []int64{1}, []int64{0}, []*Type{positions}
	for i := range others {
		blocklens, displs, types = append(blocklens, 1), append(displs, (3+i)*room), append(types, scalars)
	}
	return Struct(blocklens, displs, types)
}

// milc has, for each t, half of the slice's sites among the even ones, and then the same
// among the odd ones, which come in the second half of the lattice.
func milc(n numbers) (*Type, error) {
	slice := n["nx"] * n["ny"]
	if slice%2 != 0 {
		return nil, fmt.Errorf("%d x %d sites in a slice: want an even number", n["nx"], n["ny"])
	}
	vector, err := Contiguous(6, Float)
	if err != nil {
		return nil, err
	}
	even, err := NewVector(n["nt"], slice/2, slice*n["nz"]/2, vector)
	if err != nil {
		return nil, err
	}
	return HVector(2, 1, 6*sizeFloat*slice*n["nz"]*n["nt"]/2, even)
}

func nasLU(n numbers) (*Type, error) {
	cell, err := Contiguous(5, Double)
	if err != nil {
		return nil, err
	}
	return NewVector(n["nz"], 1, n["ny"]+2, cell)
}

func nasMG(n numbers) (*Type, error) {
	nx, ny, nz := n["nx"], n["ny"], n["nz"]
	switch n["face"] {
	case 0:
		column, err := NewVector(ny-2, 1, nx, Double)
		if err != nil {
			return nil, err
		}
		return HVector(nz-2, 1, nx*ny*sizeDouble, column)
	case 1:
		return NewVector(nz-2, nx-2, nx*ny, Double)
	default:
		return NewVector(ny-2, nx-2, nx, Double)
	}
}

func specfemOC(n numbers) (*Type, error) {
	points, err := pick(n["sent"], n["points"], n["seed"])
	if err != nil {
		return nil, err
	}
	return IndexedBlock(1, points, Float)
}

// specfemCM has points of two arrays of vectors, the second right behind the first.
func specfemCM(n numbers) (*Type, error) {
	var types [2]*Type
	for i, region := range []string{"cm", "ic"} {
		points, err := pick(n[region+"_sent"], n[region], n["seed"]+int64(i))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", region, err)
		}
		if types[i], err = IndexedBlock(3, times3(points), Float); err != nil {
			return nil, err
		}
	}
	return Struct([]int64{1, 1}, []int64{0, 3 * sizeFloat * n["cm"]}, types[:])
}

func sw4Params() []Param {
	return []Param{
		dimParam("nx", "points of a process, fastest", 64),
		dimParam("ny", "points of a process", 64),
		dimParam("nz", "points of a process, slowest", 64),
		{"padding", "points of halo on each side", 2, 1, 64},
	}
}

// sw4 returns the points of a process with halo.
func sw4(n numbers) (ni, nj, nk int64) {
	halo := 2 * n["padding"]
	return n["nx"] + halo, n["ny"] + halo, n["nz"] + halo
}

func sw4x(n numbers) (*Type, error) {
	ni, nj, nk := sw4(n)
	return NewVector(nj*nk, 3*n["padding"], 3*ni, Double)
}

func sw4y(n numbers) (*Type, error) {
	ni, nj, nk := sw4(n)
	return NewVector(nk, 3*n["padding"]*ni, 3*ni*nj, Double)
}

func wrfParams(x0, nx, y0, ny int64) []Param {
	from := func(name, help string, value int64) Param { return Param{name, help, value, 0, maxDim} }
	arrays := func(name, help string, value int64) Param { return Param{name, help, value, 0, maxVars} }
	return []Param{
		dimParam("mx", "points of an array, fastest", 32),
		dimParam("mz", "levels of an array, all in the message", 65),
		dimParam("my", "points of an array, slowest but for scalars", 52),
		from("x0", "first point of the halo in x", x0),
		dimParam("nx", "points of the halo in x", nx),
		from("y0", "first point of the halo in y", y0),
		dimParam("ny", "points of the halo in y", ny),
		arrays("vars2d", "arrays of x and y", 4),
		arrays("vars3d", "arrays of x, z and y", 3),
		arrays("vars4d", "arrays of x, z, y and scalars", 2),
		arrays("scalars", "in the message, of a 4-D array, which has one more in front", 1),
	}
}

// wrf is a struct of subarrays in Fortran order. The arrays come one after the other.
func wrf(n numbers) (*Type, error) {
	if n["vars2d"]+n["vars3d"]+n["vars4d"]*n["scalars"] == 0 {
		return nil, fmt.Errorf("no variables: want vars2d, vars3d, or vars4d and scalars of 1 or more")
	}
	for _, axis := range []string{"x", "y"} {
		first, points, all := n[axis+"0"], n["n"+axis], n["m"+axis]
		if first+points > all {
			return nil, fmt.Errorf("%d points of the halo from %d on in %s: want m%s=%d or less together", points, first, axis, axis, all)
		}
	}
	sizes := []int64{n["mx"], n["mz"], n["my"], n["scalars"] + 1}
	subsizes := []int64{n["nx"], n["mz"], n["ny"], n["scalars"]}
	starts := []int64{n["x0"], 0, n["y0"], 1}

	var (
		blocklens, displs []int64
		types             []*Type
		place             int64
	)
	add := func(arrays int64, axes ...int) error {
		var size, subsize, start []int64
		length := int64(sizeFloat)
		for _, i := range axes {
			size, subsize, start = append(size, sizes[i]), append(subsize, subsizes[i]), append(start, starts[i])
			length *= sizes[i]
		}
		t, err := Subarray(size, subsize, start, Fortran, Float)
		if err != nil {
			return err
		}
		for range arrays {
			blocklens, displs, types = append(blocklens, 1), append(displs, place), append(types, t)
			place += length
		}
		return nil
	}
	if err := add(n["vars2d"], 0, 2); err != nil {
		return nil, err
	}
	if err := add(n["vars3d"], 0, 1, 2); err != nil {
		return nil, err
	}
	if n["scalars"] > 0 {
		if err := add(n["vars4d"], 0, 1, 2, 3); err != nil {
			return nil, err
		}
	}
	return Struct(blocklens, displs, types)
}

// complexHalo is hvec(2 1 18432)[hvec(2 1 12288)[hvec(2 1 6144)[vec(32 6 8)[ctg(18)[float]]]]].
func complexHalo(numbers) (*Type, error) {
	t, err := Contiguous(18, Float)
	if err != nil {
		return nil, err
	}
	if t, err = NewVector(32, 6, 8, t); err != nil {
		return nil, err
	}
	for _, stride := range []int64{6144, 12288, 18432} {
		if t, err = HVector(2, 1, stride, t); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// pick draws count of n indices without repetition, in the order in which they are drawn:
// in the list of all, entry i is swapped with a random one of those from i on. The numbers
// are SplitMix64's, modulo how many there are to choose from.
func pick(count, n, seed int64) ([]int64, error) {
	if count > n {
		return nil, fmt.Errorf("%d indices of %d: want at most as many", count, n)
	}
	picked := make([]int64, count)
	swapped := make(map[int64]int64, count) // entries of the list that are not as they were
	at := func(i int64) int64 {
		if v, ok := swapped[i]; ok {
			return v
		}
		return i
	}
	state := uint64(seed)
	for i := range count {
		state += 0x9e3779b97f4a7c15
		z := state
		z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		z ^= z >> 31
		j := i + int64(z%uint64(n-i))
		picked[i] = at(j)
		swapped[j] = at(i)
	}
	return picked, nil
}

func times3(list []int64) []int64 {
	out := make([]int64, len(list))
	for i, v := range list {
		out[i] = 3 * v
	}
	return out
}
